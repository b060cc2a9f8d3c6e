"""A program takes one cell of a row, or one chosen token after another where pruned tokens keep their input.

A kept cell has the output of its token, for which the stream's last sum is made here. Every other cell has its input x
plus what the layer added there one scale before, enlarged. What each cell received is cached for the next scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.occupancy import num_programs
from nextscale.kernels.triton.residual_norm import arange_by_4, delta_arguments, gated, total
from nextscale.kernels.triton.resize import between, interpolate, nearest

if TYPE_CHECKING:
    from nextscale.engine.schedule import Grid
    from nextscale.methods.selection import Packed
    from nextscale.models.residual import ResidualStream


def fused_restore(
    x: Tensor,
    cached: Tensor,
    grids: tuple[Grid, Grid],
    mode: str,
    chosen: Packed,
    stream: ResidualStream,
    added: Tensor | None = None,
    moments: Tensor | None = None,
) -> Tensor:
    """Write the output of all cells over x [R, N, C], from the cache [R, n, C] of the first grid and the stream
    [1, T, C] of the chosen ones. What each cell received goes to `added`, and the mean and variance of its output, in
    the first rows, to `moments` [B, N, 2], if these are given."""
    rows, cells, channels = x.shape
    (h, w), (height, width) = grids
    x, cached = x.contiguous(), cached.contiguous()
    y, pointers, flags = _outputs(stream, x)
    _restore[(cells, rows)](
        x,
        cached,
        y,
        *pointers,
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
        **flags,
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        BILINEAR=mode == "bilinear",
        ADDED=added is not None,
        MOMENTS=moments is not None,
        num_warps=4,
    )
    return x


def fused_scatter(x: Tensor, chosen: Packed, stream: ResidualStream, moments: Tensor | None = None) -> Tensor:
    """Write the stream [1, T, C] of the chosen tokens to their cells of x [R, N, C], and their moments."""
    rows, cells, channels = x.shape
    x = x.contiguous()
    y, pointers, flags = _outputs(stream, x)
    tokens = y.shape[1]
    _scatter[(num_programs(x.device, tokens),)](
        x,
        y,
        *pointers,
        chosen.cell,
        chosen.start,
        x if moments is None else moments,
        0 if moments is None else len(moments),
        rows,
        cells,
        tokens,
        **flags,
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        MOMENTS=moments is not None,
        num_warps=4,
    )
    return x


def fused_record(x: Tensor, stream: ResidualStream, added: Tensor) -> Tensor:
    """Write the stream [R, N, C] of a layer that pruned nothing over its input x; their difference goes to `added`."""
    rows, cells, channels = x.shape
    x = x.contiguous()
    y, pointers, flags = _outputs(stream, x)
    block = triton.next_power_of_2(channels)
    _record[(cells, rows)](x, y, *pointers, added, cells, **flags, CHANNELS=channels, BLOCK=block, num_warps=4)
    return x


def _outputs(stream: ResidualStream, x: Tensor) -> tuple[Tensor, list[Tensor | int], dict[str, int]]:
    """The stream's sum so far, and the arguments for what is still to be added to it."""
    y = (stream.sum if stream.needs_gather else stream.x).contiguous()
    return y, *delta_arguments(stream.delta, stream.gate, x)


@triton.jit(do_not_specialize=["images", "cells", "h", "w", "width", "tokens"])
def _restore(
    x_ptr,
    cached_ptr,
    y_ptr,
    delta_ptr,
    bias_ptr,
    gate_ptr,
    gate_row,
    slot_ptr,
    added_ptr,
    moments_ptr,
    images,
    cells,
    h,
    w,
    width,
    tokens,
    by_row,
    by_column,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    BILINEAR: tl.constexpr,
    ADDED: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    row, cell = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = arange_by_4(BLOCK)
    real = channel < CHANNELS
    slot = tl.load(slot_ptr + row * cells + cell)
    at = (row * cells + cell) * CHANNELS + channel
    x = tl.load(x_ptr + at, mask=real, other=0.0)
    if slot >= 0:
        token, gate = slot.to(tl.int64), gate_ptr + row * gate_row
        y = _output(y_ptr, delta_ptr, bias_ptr, gate, token, tokens, channel, real, CHANNELS, SPLITS, BIAS, GATE)
        added = y - x
    else:
        base = cached_ptr + row * h * w * CHANNELS + channel
        if BILINEAR:
            nw, ne, sw, se, fr, fc = between(cell, h, w, width, by_row, by_column)
            a = tl.load(base + nw * CHANNELS, mask=real, other=0.0).to(tl.float32)
            b = tl.load(base + ne * CHANNELS, mask=real, other=0.0).to(tl.float32)
            d = tl.load(base + sw * CHANNELS, mask=real, other=0.0).to(tl.float32)
            e = tl.load(base + se * CHANNELS, mask=real, other=0.0).to(tl.float32)
            added = interpolate(a, b, d, e, fr, fc)
        else:
            at_old = nearest(cell, h, w, width, by_row, by_column) * CHANNELS
            added = tl.load(base + at_old, mask=real, other=0.0).to(tl.float32)
        y = x + added
    tl.store(x_ptr + at, y, mask=real)
    if ADDED:
        tl.store(added_ptr + at, added.to(added_ptr.dtype.element_ty), mask=real)
    if MOMENTS:
        _store_moments(y, real, moments_ptr + (row * cells + cell) * 2, row < images, CHANNELS)


@triton.jit(do_not_specialize=["images", "rows", "cells", "tokens"])
def _scatter(
    x_ptr,
    y_ptr,
    delta_ptr,
    bias_ptr,
    gate_ptr,
    gate_row,
    cell_ptr,
    start_ptr,
    moments_ptr,
    images,
    rows,
    cells,
    tokens,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    channel = arange_by_4(BLOCK)
    real = channel < CHANNELS
    for position in tl.range(tl.program_id(0), tl.load(start_ptr + rows), tl.num_programs(0)):
        token, at = tl.cast(position, tl.int64), tl.load(cell_ptr + position).to(tl.int64)
        row = at // cells
        gate = gate_ptr + row * gate_row
        y = _output(y_ptr, delta_ptr, bias_ptr, gate, token, tokens, channel, real, CHANNELS, SPLITS, BIAS, GATE)
        tl.store(x_ptr + at * CHANNELS + channel, y, mask=real)
        if MOMENTS:
            _store_moments(y, real, moments_ptr + at * 2, row < images, CHANNELS)


@triton.jit(do_not_specialize=["cells"])
def _record(
    x_ptr,
    y_ptr,
    delta_ptr,
    bias_ptr,
    gate_ptr,
    gate_row,
    added_ptr,
    cells,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, cell = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = arange_by_4(BLOCK)
    real = channel < CHANNELS
    token, tokens = row * cells + cell, tl.num_programs(1) * cells
    at = token * CHANNELS + channel
    x = tl.load(x_ptr + at, mask=real, other=0.0)
    gate = gate_ptr + row * gate_row
    y = _output(y_ptr, delta_ptr, bias_ptr, gate, token, tokens, channel, real, CHANNELS, SPLITS, BIAS, GATE)
    tl.store(x_ptr + at, y, mask=real)
    tl.store(added_ptr + at, (y - x).to(added_ptr.dtype.element_ty), mask=real)


@triton.jit
def _output(
    y_ptr,
    delta_ptr,
    bias_ptr,
    gate_ptr,
    token,
    tokens,
    channel,
    real,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
):
    """A token's sum of the stream so far, and what is still to be added to it."""
    y = tl.load(y_ptr + token * CHANNELS + channel, mask=real, other=0.0)
    if SPLITS:
        y += gated(delta_ptr, bias_ptr, gate_ptr, token, tokens, channel, real, CHANNELS, SPLITS, BIAS, GATE)
    return y


@triton.jit
def _store_moments(y, real, to, mask, CHANNELS: tl.constexpr):
    """Store mean and variance of a token."""
    mean = total(y) / CHANNELS
    centered = tl.where(real, y - mean, 0.0)
    tl.store(to, mean, mask=mask)
    tl.store(to + 1, total(centered * centered) / CHANNELS, mask=mask)
