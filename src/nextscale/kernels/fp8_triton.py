"""A program takes one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def fused_rounding(x: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    rows, channels = x.shape
    rounded = torch.empty(rows, channels, dtype=dtype, device=x.device)
    factor = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(channels)
    warps = 4 if block <= 4096 else 8
    _round[(rows,)](x.contiguous(), rounded, factor, channels, largest, BLOCK=block, num_warps=warps)
    return rounded, factor


def fused_rescale(y: Tensor, rows: Tensor, channels: Tensor, bias: Tensor | None) -> Tensor:
    """In place."""
    block = min(triton.next_power_of_2(y.shape[1]), 2048)
    grid = (y.shape[0], triton.cdiv(y.shape[1], block))
    added = y if bias is None else bias
    _rescale[grid](y, rows, channels, added, y.shape[1], BLOCK=block, BIAS=bias is not None, num_warps=4)
    return y


@triton.jit
def _rescale(y_at, rows_at, channels_at, bias_at, channels, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    at = y_at + row * channels + channel
    y = tl.load(at, mask=real, other=0.0).to(tl.float32)
    y *= tl.load(rows_at + row) * tl.load(channels_at + channel, mask=real, other=0.0)
    if BIAS:
        y += tl.load(bias_at + channel, mask=real, other=0.0).to(tl.float32)
    tl.store(at, y.to(y_at.dtype.element_ty), mask=real)


@triton.jit
def _round(x_at, rounded_at, factor_at, channels, largest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    real = channel < channels
    x = tl.load(x_at + row * channels + channel, mask=real, other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / largest
    tl.store(factor_at + row, factor)
    tl.store(rounded_at + row * channels + channel, (x / factor).to(rounded_at.dtype.element_ty), mask=real)
