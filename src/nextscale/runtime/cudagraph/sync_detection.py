"""What cannot be captured, because the host decides or waits inside a scale."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

import torch

import nextscale
from nextscale.engine.rng import PerImageNoise
from nextscale.models.base import supports_packed
from nextscale.runtime.base import CallContext
from nextscale.runtime.cudagraph.capture import StaticScale


class SyncDetected(Exception):
    """A method waits for the device inside a scale."""


def require_no_sync(run: StaticScale) -> None:
    """Try a method that is not ours. To capture one that waits would fail, and leave a device that is of no use."""
    for mode in ("default", "error"):  # kernels are compiled the first time, which waits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a prototype
            torch.cuda.set_sync_debug_mode(mode)
        try:
            run()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            ours = str(Path(nextscale.__file__).parent), str(Path(torch.__file__).parent)
            frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
            where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
            raise SyncDetected(f"waits for the device inside a scale{where}") from None
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            run.buffers.rollback()


def uncapturable_reason(call: CallContext) -> str:
    """Say what in this call cannot be captured, if anything."""
    capabilities = call.policy.capabilities
    if not isinstance(call.noise, PerImageNoise):
        return "random numbers come from the caller's generator"
    if call.forced_tokens:
        return "tokens are forced"
    if not capabilities.capturable:
        return "the method declares no graph_key"
    if not capabilities.host_only and call.backbone.device.type == "cuda" and not supports_packed(call.backbone):
        return "layers in float32, or with heads of this width, have no kernels for tokens that a method keeps"
    return ""
