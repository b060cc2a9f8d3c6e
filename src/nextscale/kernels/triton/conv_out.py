"""A program takes some pixels; the nine products of every output lie in planes of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.triton.group_norm import channel_affine

PIXELS, SHIFT_PIXELS = 128, 1024  # pixels of a program of each pass


def fused_norm_and_conv(x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d, taps: Tensor, sums: Tensor | None) -> Tensor:
    batch, channels, height, width = x.shape
    pixels, columns = height * width, taps.shape[1]
    outputs = columns // 9
    products = torch.empty(batch, columns, pixels, dtype=torch.float32, device=x.device)
    y = torch.empty(batch, outputs, height, width, dtype=x.dtype, device=x.device)
    _products[(triton.cdiv(pixels, PIXELS), batch)](
        x,
        channel_affine(x, None, norm, sums),
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
    _shift_and_add[(triton.cdiv(pixels, SHIFT_PIXELS), outputs, batch)](
        products, bias, y, height, width, HAS_BIAS=conv.bias is not None, PIXELS=SHIFT_PIXELS, num_warps=4
    )
    return y


@triton.jit
def _products(
    x_ptr,
    affine_ptr,
    taps_ptr,
    products_ptr,
    pixels,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIXELS: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    real = pixel < pixels
    channel = tl.arange(0, CHANNELS)
    column = tl.arange(0, BLOCK)
    valid = column < COLUMNS
    at = (image * pixels + pixel)[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_ptr + at, mask=real[:, None], other=0.0).to(tl.float32)
    factor = tl.load(affine_ptr + image * 2 * CHANNELS + channel)
    term = tl.load(affine_ptr + image * 2 * CHANNELS + CHANNELS + channel)
    y = x * factor[None, :] + term[None, :]
    y = (y * tl.sigmoid(y)).to(taps_ptr.dtype.element_ty)
    taps = tl.load(taps_ptr + channel[:, None] * COLUMNS + column[None, :], mask=valid[None, :], other=0.0)
    products = tl.dot(y, taps)
    to = products_ptr + (image * COLUMNS + column)[None, :] * pixels + pixel[:, None]
    tl.store(to, products, mask=real[:, None] & valid[None, :])


@triton.jit
def _shift_and_add(products_ptr, bias_ptr, y_ptr, height, width, HAS_BIAS: tl.constexpr, PIXELS: tl.constexpr):
    output, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    outputs, pixels = tl.num_programs(1), height * width
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = pixel // width, pixel % width
    total = tl.zeros((PIXELS,), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output).to(tl.float32)
    for tap in tl.static_range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        inside = (row + down >= 0) & (row + down < height) & (column + right >= 0) & (column + right < width)
        plane = products_ptr + (image * 9 * outputs + tap * outputs + output) * pixels
        total += tl.load(plane + pixel + down * width + right, mask=inside, other=0.0)
    to = y_ptr + (image * outputs + output) * pixels + pixel
    tl.store(to, total.to(y_ptr.dtype.element_ty), mask=pixel < pixels)
