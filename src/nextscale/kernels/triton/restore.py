"""A program takes one cell of a row, or one chosen token after another where holes stay as they are.

A kept cell has the output of its token, for which the stream's last sum is made here. Every other cell has its input x
plus what the layer added at this place one scale before, enlarged. What each cell received is what the next scale will
find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.num_sms import programs
from nextscale.kernels.triton.residual_norm import by_fours, gated, pending, total
from nextscale.kernels.triton.resize import between, mixed, nearest

if TYPE_CHECKING:
    from nextscale.engine.schedule import Grid
    from nextscale.methods.selection import Packed
    from nextscale.models.residual import Stream


def fused_restore(
    x: Tensor,
    cached: Tensor,
    grids: tuple[Grid, Grid],
    mode: str,
    chosen: Packed,
    stream: Stream,
    added: Tensor | None = None,
    moments: Tensor | None = None,
) -> Tensor:
    """Output of all cells [R, N, C], in the place of x [R, N, C], from the cache [R, n, C] of the first grid and the
    stream [1, T, C] of the chosen ones. What each cell received goes to `added`, and the mean and variance of its
    output, in the first rows, to `moments` [B, N, 2], if these are given."""
    rows, cells, channels = x.shape
    (h, w), (height, width) = grids
    x, cached = x.contiguous(), cached.contiguous()
    y, given, kind = _outputs(stream, x)
    _restore[(cells, rows)](
        x,
        cached,
        y,
        *given,
        chosen.slot,
        x if added is None else added,
        x if moments is None else moments,
        0 if moments is None else len(moments),
        cells,
        h,
        w,
        width,
        y.shape[1],
        h / height,
        w / width,
        **kind,
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        BILINEAR=mode == "bilinear",
        ADDED=added is not None,
        MOMENTS=moments is not None,
        num_warps=4,
    )
    return x


def fused_put(x: Tensor, chosen: Packed, stream: Stream, moments: Tensor | None = None) -> Tensor:
    """x [R, N, C] with the stream [1, T, C] of the chosen tokens in their places, and the moments of these."""
    rows, cells, channels = x.shape
    x = x.contiguous()
    y, given, kind = _outputs(stream, x)
    tokens = y.shape[1]
    _put[(programs(x.device, tokens),)](
        x,
        y,
        *given,
        chosen.cell,
        chosen.start,
        x if moments is None else moments,
        0 if moments is None else len(moments),
        rows,
        cells,
        tokens,
        **kind,
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        MOMENTS=moments is not None,
        num_warps=4,
    )
    return x


def fused_record(x: Tensor, stream: Stream, added: Tensor) -> Tensor:
    """The stream [R, N, C] of a layer that left nothing out, in the place of its input x; their difference goes to
    `added`."""
    rows, cells, channels = x.shape
    x = x.contiguous()
    y, given, kind = _outputs(stream, x)
    block = triton.next_power_of_2(channels)
    _record[(cells, rows)](x, y, *given, added, cells, **kind, CHANNELS=channels, BLOCK=block, num_warps=4)
    return x


def _outputs(stream: Stream, x: Tensor) -> tuple[Tensor, list[Tensor | int], dict[str, int]]:
    """The stream's sum so far, what is still to be added to it, and of which kind that is."""
    y = (stream.sum if stream.whole else stream.x).contiguous()
    return y, *pending(stream.delta, stream.gate, x)


@triton.jit(do_not_specialize=["images", "cells", "h", "w", "width", "tokens"])
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
    moments_at,
    images,
    cells,
    h,
    w,
    width,
    tokens,
    by_row,
    by_column,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    BILINEAR: tl.constexpr,
    ADDED: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    row, cell = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = by_fours(BLOCK)
    real = channel < CHANNELS
    slot = tl.load(slot_at + row * cells + cell)
    at = (row * cells + cell) * CHANNELS + channel
    x = tl.load(x_at + at, mask=real, other=0.0)
    if slot >= 0:
        token, gate = slot.to(tl.int64), gate_at + row * gate_row
        y = _output(y_at, delta_at, bias_at, gate, token, tokens, channel, real, CHANNELS, PARTS, BIAS, GATE)
        added = y - x
    else:
        base = cached_at + row * h * w * CHANNELS + channel
        if BILINEAR:
            nw, ne, sw, se, fr, fc = between(cell, h, w, width, by_row, by_column)
            a = tl.load(base + nw * CHANNELS, mask=real, other=0.0).to(tl.float32)
            b = tl.load(base + ne * CHANNELS, mask=real, other=0.0).to(tl.float32)
            d = tl.load(base + sw * CHANNELS, mask=real, other=0.0).to(tl.float32)
            e = tl.load(base + se * CHANNELS, mask=real, other=0.0).to(tl.float32)
            added = mixed(a, b, d, e, fr, fc)
        else:
            at_old = nearest(cell, h, w, width, by_row, by_column) * CHANNELS
            added = tl.load(base + at_old, mask=real, other=0.0).to(tl.float32)
        y = x + added
    tl.store(x_at + at, y, mask=real)
    if ADDED:
        tl.store(added_at + at, added.to(added_at.dtype.element_ty), mask=real)
    if MOMENTS:
        _note(y, real, moments_at + (row * cells + cell) * 2, row < images, CHANNELS)


@triton.jit(do_not_specialize=["images", "rows", "cells", "tokens"])
def _put(
    x_at,
    y_at,
    delta_at,
    bias_at,
    gate_at,
    gate_row,
    cell_at,
    start_at,
    moments_at,
    images,
    rows,
    cells,
    tokens,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    channel = by_fours(BLOCK)
    real = channel < CHANNELS
    for place in tl.range(tl.program_id(0), tl.load(start_at + rows), tl.num_programs(0)):
        token, at = tl.cast(place, tl.int64), tl.load(cell_at + place).to(tl.int64)
        row = at // cells
        gate = gate_at + row * gate_row
        y = _output(y_at, delta_at, bias_at, gate, token, tokens, channel, real, CHANNELS, PARTS, BIAS, GATE)
        tl.store(x_at + at * CHANNELS + channel, y, mask=real)
        if MOMENTS:
            _note(y, real, moments_at + at * 2, row < images, CHANNELS)


@triton.jit(do_not_specialize=["cells"])
def _record(
    x_at,
    y_at,
    delta_at,
    bias_at,
    gate_at,
    gate_row,
    added_at,
    cells,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, cell = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = by_fours(BLOCK)
    real = channel < CHANNELS
    token, tokens = row * cells + cell, tl.num_programs(1) * cells
    at = token * CHANNELS + channel
    x = tl.load(x_at + at, mask=real, other=0.0)
    gate = gate_at + row * gate_row
    y = _output(y_at, delta_at, bias_at, gate, token, tokens, channel, real, CHANNELS, PARTS, BIAS, GATE)
    tl.store(x_at + at, y, mask=real)
    tl.store(added_at + at, (y - x).to(added_at.dtype.element_ty), mask=real)


@triton.jit
def _output(
    y_at,
    delta_at,
    bias_at,
    gate_at,
    token,
    tokens,
    channel,
    real,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
):
    """Of a token: the stream's sum so far, and what is still to be added to it."""
    y = tl.load(y_at + token * CHANNELS + channel, mask=real, other=0.0)
    if PARTS:
        y += gated(delta_at, bias_at, gate_at, token, tokens, channel, real, CHANNELS, PARTS, BIAS, GATE)
    return y


@triton.jit
def _note(y, real, to, wanted, CHANNELS: tl.constexpr):
    """Mean and variance of a token."""
    mean = total(y) / CHANNELS
    apart = tl.where(real, y - mean, 0.0)
    tl.store(to, mean, mask=wanted)
    tl.store(to + 1, total(apart * apart) / CHANNELS, mask=wanted)
