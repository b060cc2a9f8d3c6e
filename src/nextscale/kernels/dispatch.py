"""Where kernels run: one switch for all of them, and the only import of Triton.

`NEXTSCALE_KERNELS` is `auto` (kernels on a CUDA GPU where Triton is installed), `off` (torch references everywhere) or
`interpret` (Triton's interpreter on the CPU). `NEXTSCALE_KERNELS_TMA=off` makes kernels load tiles as before Hopper.
The predicate of an operation is called `supports`, and asks `enabled` first.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch
from torch import Tensor

from nextscale.errors import NextscaleError, choices

MODES = {"auto": "cuda", "off": None, "interpret": "cpu"}  # and the type of the device whose tensors kernels take
HALF = (torch.bfloat16, torch.float16)
MIN_TMA_CAPABILITY = (9, 0)  # Hopper
USE_TMA = os.environ.get("NEXTSCALE_KERNELS_TMA") != "off"


class MissingTriton:
    """Stand in for Triton where it is not loaded: kernels can be imported, and `enabled` lets nobody launch them."""

    @staticmethod
    def jit(kernel: Any = None, **options: Any) -> Any:
        return (lambda kernel: kernel) if kernel is None else kernel

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value


def read_device() -> str | None:
    """Read the switch; where Triton is to interpret kernels, tell it before it is imported."""
    mode = os.environ.get("NEXTSCALE_KERNELS") or "auto"
    if mode not in MODES:
        raise NextscaleError(f"NEXTSCALE_KERNELS is {mode!r}; allowed: {choices(MODES)}")
    if mode == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    return MODES[mode]


DEVICE = read_device()
triton: Any = MissingTriton
tl: Any = MissingTriton
TensorDescriptor: Any = None
if DEVICE is not None:
    try:
        triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
        TensorDescriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    except ImportError:  # a CPU build of torch comes without Triton
        if DEVICE == "cpu":
            raise NextscaleError("NEXTSCALE_KERNELS=interpret needs Triton: pip install triton") from None
        DEVICE = None


def enabled(x: Tensor) -> bool:
    """Whether kernels run where x is. The interpreter takes bfloat16 for whole numbers."""
    return x.device.type == DEVICE and (x.is_cuda or x.dtype != torch.bfloat16)


def enabled_on(device: torch.device) -> bool:
    return device.type == DEVICE


def inference() -> bool:
    """Whether no gradient is recorded and nothing compiled: torch.compile fuses plain operations by itself."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether the device is a GPU that fetches tiles by itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_TMA_CAPABILITY
