"""A program takes one cell of a row.

A kept cell has the output of its slot, for which the stream's last sum is made here. Every other cell has its input x
plus what the layer added at this place one scale before, enlarged. What each cell received is what the next scale will
find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.modulate_triton import gated, pending

if TYPE_CHECKING:
    from nextscale.methods.selection import Selection
    from nextscale.models.stream import Stream
    from nextscale.schedule import Grid


def fused_restore(
    x: Tensor,
    cached: Tensor,
    grids: tuple[Grid, Grid],
    mode: str,
    chosen: Selection,
    stream: Stream,
    added: Tensor | None,
) -> Tensor:
    """Output of all cells [R, N, C], in the place of x [R, N, C], from the cache [R, n, C] of the first grid and the
    stream [R, K, C] of the chosen ones. What each cell received goes to `added`, if that is given."""
    rows, cells, channels = x.shape
    (h, w), (height, width) = grids
    y = (stream.sum if stream.chosen is not None else stream.x).contiguous()
    x, cached = x.contiguous(), cached.contiguous()
    given, kind = pending(stream.delta, stream.gate, x)
    slots, slot = chosen.index.shape[1], chosen.slot
    if slot is None:
        slot = torch.full((rows, cells), -1, dtype=torch.int32, device=x.device)
        _slots[(triton.cdiv(slots, 256), rows)](chosen.index, chosen.count, slot, slots, cells, BLOCK=256, num_warps=4)
    _restore[(cells, rows)](
        x,
        cached,
        y,
        *given,
        slot,
        x if added is None else added,
        cells,
        h,
        w,
        width,
        slots,
        h / height,
        w / width,
        **kind,
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        BILINEAR=mode == "bilinear",
        ADDED=added is not None,
        num_warps=4,
    )
    return x


@triton.jit(do_not_specialize=["slots", "cells"])
def _slots(index_at, count_at, slot_at, slots, cells, BLOCK: tl.constexpr):
    """The slot of every chosen cell."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = slot < tl.load(count_at + row)
    cell = tl.load(index_at + row * slots + slot, mask=real & (slot < slots), other=0)
    tl.store(slot_at + row * cells + cell, slot, mask=real & (slot < slots))


@triton.jit(do_not_specialize=["cells", "h", "w", "width", "slots"])
def _restore(
    x_at,
    cached_at,
    y_at,
    delta_at,
    bias_at,
    gate_at,
    gate_row,
    slot_at,
    added_at,
    cells,
    h,
    w,
    width,
    slots,
    by_row,
    by_column,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    BILINEAR: tl.constexpr,
    ADDED: tl.constexpr,
):
    row, cell = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    real = channel < CHANNELS
    slot = tl.load(slot_at + row * cells + cell)
    at = (row * cells + cell) * CHANNELS + channel
    x = tl.load(x_at + at, mask=real, other=0.0)
    if slot >= 0:
        mine = (row * slots + slot) * CHANNELS + channel
        y = tl.load(y_at + mine, mask=real, other=0.0)
        if PARTS:
            by = tl.num_programs(1).to(tl.int64) * slots * CHANNELS
            y += gated(delta_at, bias_at, gate_at + row * gate_row, mine, by, channel, real, PARTS, BIAS, GATE)
        tl.store(x_at + at, y, mask=real)
        if ADDED:
            tl.store(added_at + at, (y - x).to(added_at.dtype.element_ty), mask=real)
    else:
        base = cached_at + row * h * w * CHANNELS + channel
        if BILINEAR:
            # Cells are squares: the centre of one lies between the centres of the old ones.
            r = tl.maximum((cell // width + 0.5) * by_row - 0.5, 0.0)
            c = tl.maximum((cell % width + 0.5) * by_column - 0.5, 0.0)
            r0, c0 = tl.minimum(r.to(tl.int32), h - 1), tl.minimum(c.to(tl.int32), w - 1)
            r1, c1 = tl.minimum(r0 + 1, h - 1), tl.minimum(c0 + 1, w - 1)
            fr, fc = r - r0, c - c0
            a = tl.load(base + (r0 * w + c0) * CHANNELS, mask=real, other=0.0).to(tl.float32)
            b = tl.load(base + (r0 * w + c1) * CHANNELS, mask=real, other=0.0).to(tl.float32)
            d = tl.load(base + (r1 * w + c0) * CHANNELS, mask=real, other=0.0).to(tl.float32)
            e = tl.load(base + (r1 * w + c1) * CHANNELS, mask=real, other=0.0).to(tl.float32)
            old = (1 - fr) * ((1 - fc) * a + fc * b) + fr * ((1 - fc) * d + fc * e)
        else:
            r = tl.minimum((cell // width * by_row).to(tl.int32), h - 1)
            c = tl.minimum((cell % width * by_column).to(tl.int32), w - 1)
            old = tl.load(base + (r * w + c) * CHANNELS, mask=real, other=0.0).to(tl.float32)
        tl.store(x_at + at, x + old, mask=real)
        if ADDED:
            tl.store(added_at + at, old.to(added_at.dtype.element_ty), mask=real)
