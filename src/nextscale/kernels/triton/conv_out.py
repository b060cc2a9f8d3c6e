"""A program takes some pixels; the nine products of every output lie in planes of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nextscale.kernels.triton.group_norm import factors

PIXELS, SHIFTED = 128, 1024  # pixels of a program of each pass


def fused_norm_and_conv(x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d, taps: Tensor, sums: Tensor | None) -> Tensor:
    batch, channels, height, width = x.shape
    pixels, columns = height * width, taps.shape[1]
    outputs = columns // 9
    products = torch.empty(batch, columns, pixels, dtype=torch.float32, device=x.device)
    y = torch.empty(batch, outputs, height, width, dtype=x.dtype, device=x.device)
    _products[(triton.cdiv(pixels, PIXELS), batch)](
        x,
        factors(x, None, norm, sums),
        taps,
        products,
        pixels,
        CHANNELS=channels,
        COLUMNS=columns,
        BLOCK=max(triton.next_power_of_2(columns), 16),
        PIXELS=PIXELS,
        num_warps=4,
    )
    bias = taps if conv.bias is None else conv.bias
    _shift_and_add[(triton.cdiv(pixels, SHIFTED), outputs, batch)](
        products, bias, y, height, width, HAS_BIAS=conv.bias is not None, PIXELS=SHIFTED, num_warps=4
    )
    return y


@triton.jit
def _products(
    x_at,
    affine_at,
    taps_at,
    products_at,
    pixels,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIXELS: tl.constexpr,
):
    picture = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    real = pixel < pixels
    channel = tl.arange(0, CHANNELS)
    column = tl.arange(0, BLOCK)
    known = column < COLUMNS
    at = (picture * pixels + pixel)[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_at + at, mask=real[:, None], other=0.0).to(tl.float32)
    factor = tl.load(affine_at + picture * 2 * CHANNELS + channel)
    term = tl.load(affine_at + picture * 2 * CHANNELS + CHANNELS + channel)
    y = x * factor[None, :] + term[None, :]
    y = (y * tl.sigmoid(y)).to(taps_at.dtype.element_ty)
    taps = tl.load(taps_at + channel[:, None] * COLUMNS + column[None, :], mask=known[None, :], other=0.0)
    products = tl.dot(y, taps)
    to = products_at + (picture * COLUMNS + column)[None, :] * pixels + pixel[:, None]
    tl.store(to, products, mask=real[:, None] & known[None, :])


@triton.jit
def _shift_and_add(products_at, bias_at, y_at, height, width, HAS_BIAS: tl.constexpr, PIXELS: tl.constexpr):
    output, picture = tl.program_id(1), tl.program_id(2).to(tl.int64)
    outputs, pixels = tl.num_programs(1), height * width
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = pixel // width, pixel % width
    total = tl.zeros((PIXELS,), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_at + output).to(tl.float32)
    for tap in tl.static_range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        inside = (row + down >= 0) & (row + down < height) & (column + right >= 0) & (column + right < width)
        plane = products_at + (picture * 9 * outputs + tap * outputs + output) * pixels
        total += tl.load(plane + pixel + down * width + right, mask=inside, other=0.0)
    to = y_at + (picture * outputs + output) * pixels + pixel
    tl.store(to, total.to(y_at.dtype.element_ty), mask=pixel < pixels)
