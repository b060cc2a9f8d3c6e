"""As many programs as the GPU has processors take tiles of the result, one after the other; how large tiles are, and
whether programs share the input channels of one, each of them finds out from the number of tokens.

Programs that share a tile write what they have summed, wait for each other, and then each of them adds up its share of
the tile's tokens, always in the same order.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from nextscale.kernels.fp8 import Reads

from nextscale.kernels.triton.fp8 import as_read

# Tiles of 64 x 64 tokens and output channels, and of 128 x 64, 128, 256.
FEW, TALL, MANY, WIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
MOST_PARTS = tl.constexpr(8)
LARGEST = 128 * 256  # numbers of a tile
BLOCK = 4096  # numbers that a program takes at once where nothing is multiplied
ANY = -1


def fused_product(
    x: Tensor,
    weight: Tensor,
    by: float,
    bias: Tensor | None,
    start: Tensor,
    reads: Reads,
    gelu: bool,
    programs: int,
    arrived: Tensor,
    tma: bool,
    waits: bool,
    way: int = ANY,
) -> Tensor:
    """[1, T, N] of x [1, T, K], times `by`, plus the bias; `arrived` is zero before the first call, and nothing else
    may write it. `way`: a place in the list of `_cheapest`, for those who compare them.

    `waits`: all programs run at once, and those that share a tile wait for each other: so there must be no more than
    the GPU has processors, and nothing else may keep one of those to itself. Otherwise the last of them does what is
    left."""
    tokens, into = x.shape[1:]
    out = len(weight)
    y = torch.empty(1, tokens, out, dtype=reads.dtype, device=x.device)
    if not tokens:
        return y
    small = x.element_size() == 1
    deep, few_deep = (128, 128) if small else (64, 128)
    flat, weight = x[0].contiguous(), weight.contiguous()
    fetched: list[Any] = [None] * 8
    if tma:  # the GPU fetches tiles by itself; one description for each shape of them
        fetched = [
            *(TensorDescriptor.from_tensor(flat, [rows, few_deep]) for rows in (64, 128)),
            TensorDescriptor.from_tensor(flat, [128, deep]),
            TensorDescriptor.from_tensor(weight, [64, few_deep]),
            *(TensorDescriptor.from_tensor(weight, [width, deep]) for width in (128, 256)),
            *(TensorDescriptor.from_tensor(y[0], [128, width]) for width in (128, 256)),
        ]
    _product[(programs,)](
        *fetched,
        flat,
        weight,
        y,
        flat if bias is None else bias.contiguous(),
        start,
        torch.empty(programs * LARGEST, dtype=torch.float32, device=x.device),
        arrived,
        by,
        reads.by,
        len(start) - 1,
        tokens,
        out,
        into,
        way,
        BIAS=bias is not None,
        GELU=gelu,
        TMA=tma,
        DEEP=deep,
        FEW_DEEP=few_deep,
        # Small tiles wait for what is on its way: that must be much, and as much in 8 bits.
        FEW_STAGES=(6 if small else 4) if tma else 3,
        TALL_STAGES=7 if small else 4,
        STAGES=5 if tma else 3,
        WAITS=waits,
        num_warps=8,
        num_stages=3,
    )
    return y


def fused_gated(gate: Tensor, up: Tensor | None, start: Tensor, reads: Reads, programs: int) -> Tensor:
    """silu(gate) * up, or without `up` the first alone as it is, [1, T, N], as a layer reads it."""
    y = torch.empty(gate.shape, dtype=reads.dtype, device=gate.device)
    if not y.numel():
        return y
    _gated[(4 * programs,)](
        gate.contiguous(),
        gate if up is None else up.contiguous(),
        y,
        start,
        reads.by,
        len(start) - 1,
        *gate.shape[1:],
        GATED=up is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return y


@triton.jit(do_not_specialize=["last", "capacity", "way"])
def _product(
    few_x,
    tall_x,
    x,
    few_weight,
    weight,
    wide_weight,
    y,
    wide_y,
    x_at,
    weight_at,
    y_at,
    bias_at,
    start_at,
    sums_at,
    arrived_at,
    by,
    y_by,
    last,
    capacity,
    out,
    into,
    way,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    DEEP: tl.constexpr,
    FEW_DEEP: tl.constexpr,
    FEW_STAGES: tl.constexpr,
    TALL_STAGES: tl.constexpr,
    STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):
    tl.assume(into > 0)
    total = tl.minimum(tl.load(start_at + last), capacity)
    best = _cheapest(total, out, into, way, TMA, x_at.dtype.element_ty.primitive_bitwidth, DEEP, FEW_DEEP)
    size, parts = best // MOST_PARTS, best % MOST_PARTS + 1
    at = x_at, weight_at, y_at, bias_at
    numbers = total, out, into, by, y_by
    sums = sums_at, arrived_at, parts
    if size == FEW:
        # One loop for both: of small tiles hardly any program takes a second one.
        _shared(few_x, few_weight, *at, *sums, *numbers, BIAS, GELU, TMA, WAITS, 64, 64, FEW_DEEP, FEW_STAGES)
    elif size == MANY:
        if parts == 1:
            _whole(x, weight, y, *at, *numbers, BIAS, GELU, TMA, 128, 128, DEEP)
        else:
            _shared(x, weight, *at, *sums, *numbers, BIAS, GELU, TMA, WAITS, 128, 128, DEEP, STAGES)
    elif TMA:
        if size == TALL:
            _shared(tall_x, few_weight, *at, *sums, *numbers, BIAS, GELU, TMA, WAITS, 128, 64, FEW_DEEP, TALL_STAGES)
        elif parts == 1:
            _whole(x, wide_weight, wide_y, *at, *numbers, BIAS, GELU, TMA, 128, 256, DEEP)
        else:
            _shared(x, wide_weight, *at, *sums, *numbers, BIAS, GELU, TMA, WAITS, 128, 256, DEEP, 4)


@triton.jit
def _cheapest(total, out, into, way, TMA: tl.constexpr, BITS: tl.constexpr, DEEP: tl.constexpr, FEW_DEEP: tl.constexpr):
    """The way to multiply that takes least time: size of the tiles * MOST_PARTS + parts - 1. All are compared at once,
    a thread each. Microseconds are those that an H200 was measured to take."""
    each = tl.arange(0, 4 * MOST_PARTS)
    size, parts = each // MOST_PARTS, each % MOST_PARTS + 1
    rows, width = _of(size, 64, 128, 128, 128), _of(size, 64, 64, 128, 256)
    tiles = ((total + rows - 1) // rows) * ((out + width - 1) // width)
    programs = tl.num_programs(0)
    rounds = (tiles * parts + programs - 1) // programs
    # Once; for every tile; and for 2048 channels of one in 16 bits.
    once, each_tile = _of(size, 2.8, 3.0, 2.0, 1.6), _of(size, 1.4, 1.0, 0.0, 4.1)
    channels = _of(size, 6.7, 11.0, 16.7, 19.0) * (into * BITS / (2048.0 * 16))
    # To wait for all parts; and for their sums.
    wait, read = _of(size, 1.2, 1.8, 3.8, 6.0), _of(size, 0.2, 0.2, 0.5, 0.5) * tl.minimum(total, rows) / rows
    cost = once + rounds * (each_tile + channels / parts) + tl.where(parts > 1, wait + read * parts, 0.0)
    # A program shares one tile at most: so sums have a place for every program, and nobody waits for a second round.
    deep = _of(size, FEW_DEEP, FEW_DEEP, DEEP, DEEP)
    fits = (parts == 1) | ((tiles * parts <= programs) & (parts <= (into + deep - 1) // deep))
    # Before Hopper, some tiles need more memory than there is.
    fits &= TMA | (size == FEW) | (size == MANY)
    # What takes long with few tokens is reading the weights, and small tiles read them with most programs.
    wanted = tl.where(way < 0, (size == FEW) | (total > 64), each == way)
    return tl.argmin(tl.where(fits & wanted, cost, float("inf")), 0)


@triton.jit
def _of(size, few, tall, many, wide):
    """What tiles of a size have."""
    return tl.where(size == FEW, few, tl.where(size == TALL, tall, tl.where(size == MANY, many, wide)))


@triton.jit
def _whole(
    x,
    weight,
    y,
    x_at,
    weight_at,
    y_at,
    bias_at,
    total,
    out,
    into,
    by,
    y_by,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEEP: tl.constexpr,
):
    """Tiles one after the other; while one is written, the next is on its way.

    With two sums, for 192 channels, ptxas lets no product of the whole kernel run beside another (C7515)."""
    down, across = tl.cdiv(total, ROWS), tl.cdiv(out, WIDTH)
    programs, done = tl.num_programs(0), tl.program_id(0)
    for tile in tl.range(tl.program_id(0), down * across, programs, flatten=True):
        row, channel = _place(tile, down, across, ROWS, WIDTH)
        sums = tl.zeros((ROWS, WIDTH), tl.float32)
        for source in tl.range(0, into, DEEP):
            a = _tile(x, x_at, row, total, source, into, ROWS, DEEP, TMA)
            b = _tile(weight, weight_at, channel, out, source, into, WIDTH, DEEP, TMA)
            sums = tl.dot(a, b.T, sums)
        # Counted once more, so that what is written does not keep back what is fetched.
        row, channel = _place(done, down, across, ROWS, WIDTH)
        done += programs
        result = _finished(sums, by, bias_at, channel, out, y_by, y_at.dtype.element_ty, BIAS, GELU, WIDTH)
        if TMA:  # writes behind the last token, too, where nobody reads, but never beside the tensor
            y.store([row, channel], result)
        else:
            _write(y_at, result, row, total, channel, out, ROWS, WIDTH)


@triton.jit
def _shared(
    x,
    weight,
    x_at,
    weight_at,
    y_at,
    bias_at,
    sums_at,
    arrived_at,
    parts,
    total,
    out,
    into,
    by,
    y_by,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    WAITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Parts of tiles, which the tile's programs add up together, or the last of them alone.

    That they wait for each other never ends in waiting for a program that has no place to run: the grid has no more
    programs than the GPU has processors, each of which has the memory for one; a program shares one tile at most; and
    none that waits has anything left that others wait for."""
    CHUNK: tl.constexpr = ROWS // 4  # tokens that are added up at once, for there are only so many registers
    dtype: tl.constexpr = y_at.dtype.element_ty
    down, across = tl.cdiv(total, ROWS), tl.cdiv(out, WIDTH)
    tiles, steps = down * across, tl.cdiv(into, DEEP)
    for item in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        tile, part = item % tiles, item // tiles
        row, channel = _place(tile, down, across, ROWS, WIDTH)
        sums = tl.zeros((ROWS, WIDTH), tl.float32)
        for step in tl.range(part * steps // parts, (part + 1) * steps // parts, num_stages=STAGES):
            a = _tile(x, x_at, row, total, step * DEEP, into, ROWS, DEEP, TMA)
            b = _tile(weight, weight_at, channel, out, step * DEEP, into, WIDTH, DEEP, TMA)
            sums = tl.dot(a, b.T, sums)
        if parts == 1:
            result = _finished(sums, by, bias_at, channel, out, y_by, dtype, BIAS, GELU, WIDTH)
            _write(y_at, result, row, total, channel, out, ROWS, WIDTH)
        else:
            inside = tl.arange(0, ROWS)
            to = sums_at + item * (ROWS * WIDTH) + inside[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            tl.store(to, sums, mask=(row + inside < total)[:, None])
            tl.debug_barrier()  # all threads have written before one says so
            chunks = tl.cdiv(tl.minimum(total - row, ROWS), CHUNK)
            if WAITS:
                _wait(arrived_at + tile, part, parts)
                first, each = part, parts
            else:
                first, each = chunks, 1
                if tl.atomic_add(arrived_at + tile, 1, sem="acq_rel") == parts - 1:
                    first = 0
                    tl.store(arrived_at + tile, 0)  # for the next call
            for chunk in range(first, chunks, each):
                own = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
                place = tile * (ROWS * WIDTH) + own * WIDTH + tl.arange(0, WIDTH)[None, :]
                added = tl.zeros((CHUNK, WIDTH), tl.float32)
                for some in range(0, parts, 4):
                    for other in tl.static_range(4):  # loads do not wait for sums
                        there = sums_at + (some + other) * tiles * (ROWS * WIDTH) + place
                        real = row + own < tl.where(some + other < parts, total, 0)
                        # Not from the cache of this processor, which does not hear of others.
                        added += tl.load(there, mask=real, other=0.0, cache_modifier=".cg")
                result = _finished(added, by, bias_at, channel, out, y_by, dtype, BIAS, GELU, WIDTH)
                _write(y_at, result, row + chunk * CHUNK, total, channel, out, CHUNK, WIDTH)


@triton.jit
def _wait(at, part, parts):
    """Until all parts are here. The first of them adds 2 ** 31 less what the others add: so the top bit turns once
    all have come, the rest is zero again, and nobody has to clean up for the next call."""
    TOP: tl.constexpr = -2147483648
    before = tl.atomic_add(at, tl.where(part == 0, TOP - (parts - 1), 1), sem="acq_rel")
    now = before
    while (now ^ before) >= 0:
        now = tl.atomic_add(at, 0, sem="acquire")


@triton.jit
def _place(tile, down, across, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The first token and channel of a tile. Those of a while share tokens and weights: 16 tiles of tokens at most,
    then the next channels."""
    GROUP: tl.constexpr = 16
    before = tile // (GROUP * across) * GROUP
    there = tl.minimum(down - before, GROUP)
    inside = tile % (GROUP * across)
    return (before + inside % there) * ROWS, inside // there * WIDTH


@triton.jit
def _tile(fetched, at, row, rows, channel, into, ROWS: tl.constexpr, DEEP: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, DEEP] of a matrix with so many rows. What is behind the last token may be anything: it stays in its
    row."""
    if TMA:
        return fetched.load([row, channel])
    rank = row + tl.arange(0, ROWS)
    source = channel + tl.arange(0, DEEP)
    place = at + rank[:, None].to(tl.int64) * into + source[None, :]
    return tl.load(place, mask=(rank < rows)[:, None] & (source < into)[None, :], other=0.0)


@triton.jit
def _finished(
    sums,
    by,
    bias_at,
    channel,
    out,
    y_by,
    dtype: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    WIDTH: tl.constexpr,
):
    result = sums * by
    if BIAS:
        channels = channel + tl.arange(0, WIDTH)
        result += tl.load(bias_at + channels, mask=channels < out, other=0.0).to(tl.float32)[None, :]
    if GELU:  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        result *= tl.sigmoid(1.5957691216057308 * (result + 0.044715 * result * result * result))
    return as_read(result, y_by, dtype)


@triton.jit
def _write(y_at, result, row, total, channel, out, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rank = row + tl.arange(0, ROWS)
    channels = channel + tl.arange(0, WIDTH)
    place = y_at + rank[:, None].to(tl.int64) * out + channels[None, :]
    tl.store(place, result, mask=(rank < total)[:, None] & (channels < out)[None, :])


@triton.jit(do_not_specialize=["last", "capacity"])
def _gated(gate_at, up_at, y_at, start_at, by, last, capacity, width, GATED: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.minimum(tl.load(start_at + last), capacity).to(tl.int64) * width
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        real = at < count
        result = tl.load(gate_at + at, mask=real, other=0.0).to(tl.float32)
        if GATED:
            result *= tl.sigmoid(result) * tl.load(up_at + at, mask=real, other=0.0).to(tl.float32)
        tl.store(y_at + at, as_read(result, by, y_at.dtype.element_ty), mask=real)
