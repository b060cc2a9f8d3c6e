"""The runtimes by name, and what each needs of a device."""

from __future__ import annotations

import logging

import torch

from nextscale.io.arguments import read_choice
from nextscale.runtime.base import Executor
from nextscale.runtime.compiled import Compiled
from nextscale.runtime.cudagraph.executor import CUDAGraphExecutor
from nextscale.runtime.eager import Eager

logger = logging.getLogger(__name__)

RUNTIMES: dict[str, type[Executor]] = {kind.name: kind for kind in (Eager, Compiled, CUDAGraphExecutor)}
MIN_CAPABILITY = (7, 0)  # of the GPUs that Triton, and so torch.compile, writes code for


def check_runtime(runtime: str) -> None:
    read_choice(runtime, "runtime", RUNTIMES)


def make_executor(runtime: str, device: torch.device) -> Executor:
    check_runtime(runtime)
    missing = why_missing(runtime, device)
    if missing:
        logger.warning("runtime %s needs %s; the images are made with runtime eager", runtime, missing)
        return Eager()
    return RUNTIMES[runtime]()


def why_missing(runtime: str, device: torch.device) -> str:
    """What the device lacks for it, if anything."""
    if runtime == "graphs" and device.type != "cuda":
        return f"a CUDA GPU, not {device.type}"
    if runtime != "eager" and device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"a GPU of compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return ""
