"""Each program rounds a block of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton

if TYPE_CHECKING:
    from nextscale.kernels.fp8 import InputFormat

BLOCK = 4096


def fused_cast(x: Tensor, input_format: InputFormat, gelu: bool = False) -> Tensor:
    """x, or GELU of it by its tanh formula, in the input format of a layer."""
    out = torch.empty(x.shape, dtype=input_format.dtype, device=x.device)
    _cast[(triton.cdiv(x.numel(), BLOCK),)](
        x.contiguous(), out, x.numel(), input_format.scale, GELU=gelu, BLOCK=BLOCK, num_warps=8
    )
    return out


@triton.jit
def arange_by_8(WIDTH: tl.constexpr):
    """Channels to be written, 8 at a time: 16, which FP8 allows, would be forced upon keys and values, too, which then
    could not be prefetched."""
    return tl.max_contiguous(tl.arange(0, WIDTH), 8)


@triton.jit
def cast(x, scale, dtype: tl.constexpr):
    """x in a dtype; for FP8 it is scaled first, and what is too large becomes the largest number."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x * scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _cast(x_ptr, out_ptr, count, scale, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    if GELU:
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    tl.store(out_ptr + at, cast(x, scale, out_ptr.dtype.element_ty), mask=real)
