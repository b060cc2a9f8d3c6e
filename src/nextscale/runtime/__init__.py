"""How a planned scale is run: eager, compiled, as CUDA graphs."""

from __future__ import annotations

import logging

import torch

from nextscale.errors import NextscaleError, choices
from nextscale.runtime.compiled import Compiled
from nextscale.runtime.eager import Eager
from nextscale.runtime.graphs import Graphs

logger = logging.getLogger(__name__)

RUNTIMES: dict[str, type[Eager]] = {kind.name: kind for kind in (Eager, Compiled, Graphs)}
OLDEST = (7, 0)  # of the GPUs that Triton, and so torch.compile, writes code for


def check_runtime(runtime: str) -> None:
    if runtime not in RUNTIMES:
        raise NextscaleError(f"unknown runtime {runtime!r}; allowed: {choices(RUNTIMES)}")


def make_executor(runtime: str, device: torch.device) -> Eager:
    check_runtime(runtime)
    missing = why_missing(runtime, device)
    if missing:
        logger.warning("runtime %s needs %s; the pictures are made with runtime eager", runtime, missing)
        return Eager()
    return RUNTIMES[runtime]()


def why_missing(runtime: str, device: torch.device) -> str:
    """What the device lacks for it, if anything."""
    if runtime == "graphs" and device.type != "cuda":
        return f"a CUDA GPU, not {device.type}"
    if runtime != "eager" and device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"a GPU of compute capability {OLDEST[0]}.{OLDEST[1]}"
    return ""
