"""A program takes some numbers in a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nextscale.kernels.fp8 import Reads

BLOCK = 4096


def fused_cast(x: Tensor, reads: Reads, gelu: bool = False) -> Tensor:
    """x, or GELU of it by its tanh formula, as a layer reads it."""
    out = torch.empty(x.shape, dtype=reads.dtype, device=x.device)
    _cast[(triton.cdiv(x.numel(), BLOCK),)](
        x.contiguous(), out, x.numel(), reads.by, GELU=gelu, BLOCK=BLOCK, num_warps=8
    )
    return out


@triton.jit
def by_eights(WIDTH: tl.constexpr):
    """Channels from 0 to WIDTH to be written: 16 at a time, which 8 bits allow, would be forced upon keys and values,
    too, which then could not be fetched ahead."""
    return tl.max_contiguous(tl.arange(0, WIDTH), 8)


@triton.jit
def as_read(x, by, dtype: tl.constexpr):
    """x in a dtype; in 8 bits it is multiplied first, and what is too large becomes the largest there is."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x * by, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _cast(x_at, out_at, count, by, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    x = tl.load(x_at + at, mask=real, other=0.0).to(tl.float32)
    if GELU:
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    tl.store(out_at + at, as_read(x, by, out_at.dtype.element_ty), mask=real)
