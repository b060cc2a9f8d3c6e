"""A program takes one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.parts import Parts


def fused_rounding(x: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    """x [..., K] in `dtype`, and the factor of each row."""
    rounded = torch.empty(x.shape, dtype=dtype, device=x.device)
    factor = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    channels = x.shape[-1]
    block = triton.next_power_of_2(channels)
    x = x.contiguous()
    _round[(factor.numel(),)](x, rounded, factor, channels, largest, BLOCK=block, num_warps=_warps(block))
    return rounded, factor


def fused_gelu(y: Parts, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    """GELU, by its tanh formula, of what a linear layer gave; as above."""
    _, *rows, channels = y.sums.shape
    rounded = torch.empty(*rows, channels, dtype=dtype, device=y.sums.device)
    factor = torch.empty(rows, dtype=torch.float32, device=y.sums.device)
    block = triton.next_power_of_2(channels)
    given = [y.sums if t is None else t for t in y]
    kind = {"SCALED": y.by_row is not None, "BIAS": y.bias is not None}
    _gelu[(factor.numel(),)](*given, rounded, factor, channels, largest, BLOCK=block, **kind, num_warps=_warps(block))
    return rounded, factor


def fused_rescale(y: Tensor, by: Parts) -> Tensor:
    """y [..., N] with factors and bias, in place."""
    channels = y.shape[-1]
    block = min(triton.next_power_of_2(channels), 2048)
    grid = (y.numel() // channels, triton.cdiv(channels, block))
    bias = y if by.bias is None else by.bias
    _rescale[grid](y, bias, by.by_row, by.by_channel, channels, BLOCK=block, BIAS=by.bias is not None, num_warps=4)
    return y


def _warps(block: int) -> int:
    return 4 if block <= 4096 else 8


@triton.jit
def scaled(y, row, channel, real, bias_at, rows_at, channels_at, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Some channels of a row, times their factors and with the bias."""
    if SCALED:
        y *= tl.load(rows_at + row) * tl.load(channels_at + channel, mask=real, other=0.0)
    if BIAS:
        y += tl.load(bias_at + channel, mask=real, other=0.0).to(tl.float32)
    return y


@triton.jit
def factor_of(x, largest):
    """Of a row that has been read: what it will have to be multiplied with if it is to end at `largest` now."""
    return tl.maximum(tl.max(tl.abs(x)), 1e-12) / largest


@triton.jit
def _rescale(y_at, bias_at, rows_at, channels_at, channels, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    at = y_at + row * channels + channel
    y = tl.load(at, mask=real, other=0.0).to(tl.float32)
    y = scaled(y, row, channel, real, bias_at, rows_at, channels_at, True, BIAS)
    tl.store(at, y.to(y_at.dtype.element_ty), mask=real)


@triton.jit
def _round(x_at, rounded_at, factor_at, channels, largest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    real = channel < channels
    x = tl.load(x_at + row * channels + channel, mask=real, other=0.0).to(tl.float32)
    factor = factor_of(x, largest)
    tl.store(factor_at + row, factor)
    tl.store(rounded_at + row * channels + channel, (x / factor).to(rounded_at.dtype.element_ty), mask=real)


@triton.jit
def _gelu(
    y_at,
    bias_at,
    rows_at,
    channels_at,
    rounded_at,
    factor_at,
    channels,
    largest,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    real = channel < channels
    y = tl.load(y_at + row * channels + channel, mask=real, other=0.0).to(tl.float32)
    y = scaled(y, row, channel, real, bias_at, rows_at, channels_at, SCALED, BIAS)
    y *= tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    factor = factor_of(y, largest)
    tl.store(factor_at + row, factor)
    tl.store(rounded_at + row * channels + channel, (y / factor).to(rounded_at.dtype.element_ty), mask=real)
