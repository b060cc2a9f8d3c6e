"""A program takes a rectangle of cells and some outputs; the GPU fetches the rectangle nine times, each time shifted by
a cell, with zeros outside of the map.

Outputs are the rows of the product: so sums over cells, which the next norm needs, stay inside of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.kernels.dispatch import TensorDescriptor, tl, triton
from nextscale.kernels.fp8 import FP8Conv

CHANNELS = 128  # outputs of a program, and inputs that it takes at once
COLUMNS = 16  # of a rectangle


def fused_conv(x: Tensor, conv: FP8Conv, bias: Tensor, groups: int, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve x [B, C, H, W]; also return sums and sums of squares over tiles of the cells, [B, 2, groups, tiles]."""
    batch, channels, height, width = x.shape
    outputs = len(conv.weight)
    # 128 outputs are all that a wide map has: then two small programs share an SM, and one writes while the
    # other one multiplies.
    rows, warps = (8, 4) if outputs == CHANNELS else (16, 8)
    weight = conv.weight.permute(0, 2, 3, 1).reshape(outputs, -1)
    # Not its own strides: with a single cell, any strides count as channels last.
    cells = x.as_strided((batch, height, width, channels), (height * width * channels, width * channels, channels, 1))
    y = torch.empty(batch, outputs, height, width, dtype=bias.dtype, device=x.device, memory_format=torch.channels_last)
    tiles = triton.cdiv(height, rows) * triton.cdiv(width, COLUMNS)
    sums = torch.empty(batch, 2, groups, tiles, dtype=torch.float32, device=x.device)
    _conv[(tiles * (outputs // CHANNELS), batch)](
        TensorDescriptor.from_tensor(cells, [1, rows, COLUMNS, CHANNELS]),
        TensorDescriptor.from_tensor(weight, [CHANNELS, CHANNELS]),
        y,
        y if residual is None else residual,
        bias,
        sums,
        conv.factor,
        height,
        width,
        channels // CHANNELS,
        OUTPUTS=outputs,
        GROUP=outputs // groups,
        ADD=residual is not None,
        ROWS=rows,
        COLUMNS=COLUMNS,
        BLOCK=CHANNELS,
        num_warps=warps,
        num_stages=3,
    )
    return y, sums


@triton.jit(do_not_specialize=["height", "width", "steps"])
def _conv(
    x,
    weight,
    y_ptr,
    residual_ptr,
    bias_ptr,
    sums_ptr,
    scale,
    height,
    width,
    steps,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1)
    tile, first = tl.program_id(0) // (OUTPUTS // BLOCK), tl.program_id(0) % (OUTPUTS // BLOCK) * BLOCK
    across = tl.cdiv(width, COLUMNS)
    top, left = tile // across * ROWS, tile % across * COLUMNS
    total = tl.zeros((BLOCK, ROWS * COLUMNS), tl.float32)
    for step in tl.range(0, 9 * steps):
        tap = step // steps
        cells = x.load([image, top + tap // 3 - 1, left + tap % 3 - 1, step % steps * BLOCK])
        total = tl.dot(weight.load([first, step * BLOCK]), cells.reshape(ROWS * COLUMNS, BLOCK).T, total)
    output = first + tl.arange(0, BLOCK)
    cell = tl.arange(0, ROWS * COLUMNS)
    row, column = top + cell // COLUMNS, left + cell % COLUMNS
    real = ((row < height) & (column < width))[None, :]
    start = image.to(tl.int64) * height * width * OUTPUTS
    at = ((row * width + column) * OUTPUTS)[None, :] + output[:, None]
    y = total * scale + tl.load(bias_ptr + output).to(tl.float32)[:, None]
    if ADD:
        y += tl.load(residual_ptr + start + at, mask=real, other=0.0).to(tl.float32)
    rounded = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + start + at, rounded, mask=real)
    y = tl.where(real, rounded.to(tl.float32), 0.0)
    groups: tl.constexpr = OUTPUTS // GROUP
    group = first // GROUP + tl.arange(0, BLOCK // GROUP)
    tiles = tl.num_programs(0) // (OUTPUTS // BLOCK)
    to = sums_ptr + (image * 2 * groups + group) * tiles + tile
    tl.store(to, tl.sum(tl.reshape(tl.sum(y, 1), (BLOCK // GROUP, GROUP)), 1))
    tl.store(to + groups * tiles, tl.sum(tl.reshape(tl.sum(y * y, 1), (BLOCK // GROUP, GROUP)), 1))
