"""A program per SM takes tiles of the result, one after the other. The number of tokens tells each of them how large
tiles are, and whether several programs split the input channels of one (split-K).

Programs that split a tile write their sums, wait for each other, and then each of them adds up some of the tile's
tokens, always in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nextscale.kernels.fp8 import InputFormat

from nextscale.kernels.dispatch import TensorDescriptor, tl, triton
from nextscale.kernels.triton.fp8 import cast

# Tiles of 64 x 64 tokens and output channels, and of 128 x 64, 128 x 128 and 128 x 256.
SMALL_TILE, TALL_TILE, SQUARE_TILE, WIDE_TILE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
MAX_SPLITS = tl.constexpr(8)
MAX_TILE_NUMBERS = 128 * 256
BLOCK = 4096  # numbers that a program takes at once where nothing is multiplied


def fused_product(
    x: Tensor,
    weight: Tensor,
    scale: float,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    output_format: InputFormat,
    gelu: bool,
    programs: int,
    counters: Tensor,
    tma: bool,
    waits: bool,
) -> Tensor:
    """Multiply x [1, T, K] with the weights and `scale`, and add the bias: [1, T, N]. `counters` are zero before the
    first call, and nothing else may write them.

    `waits`: all programs run at once, and those that split a tile wait for each other: so there must be no more than
    the GPU has SMs, and nothing else may occupy one of these. Otherwise the last of them does the rest."""
    tokens, K = x.shape[1:]
    N = len(weight)
    y = torch.empty(1, tokens, N, dtype=output_format.dtype, device=x.device)
    if not tokens:
        return y
    fp8 = x.element_size() == 1
    block_k, small_block_k = (128, 128) if fp8 else (64, 128)
    flat, weight = x[0].contiguous(), weight.contiguous()
    descriptors: list[Any] = [None] * 8
    if tma:  # the GPU fetches tiles by itself; one description for each shape of them
        descriptors = [
            *(TensorDescriptor.from_tensor(flat, [rows, small_block_k]) for rows in (64, 128)),
            TensorDescriptor.from_tensor(flat, [128, block_k]),
            TensorDescriptor.from_tensor(weight, [64, small_block_k]),
            *(TensorDescriptor.from_tensor(weight, [width, block_k]) for width in (128, 256)),
            *(TensorDescriptor.from_tensor(y[0], [128, width]) for width in (128, 256)),
        ]
    _product[(programs,)](
        *descriptors,
        flat,
        weight,
        y,
        flat if bias is None else bias.contiguous(),
        cu_seqlens,
        torch.empty(programs * MAX_TILE_NUMBERS, dtype=torch.float32, device=x.device),
        counters,
        scale,
        output_format.scale,
        len(cu_seqlens) - 1,
        tokens,
        N,
        K,
        BIAS=bias is not None,
        GELU=gelu,
        TMA=tma,
        BLOCK_K=block_k,
        SMALL_BLOCK_K=small_block_k,
        # Small tiles wait for loads: many bytes must be on their way, as many in FP8.
        SMALL_STAGES=(6 if fp8 else 4) if tma else 3,
        TALL_STAGES=7 if fp8 else 4,
        STAGES=5 if tma else 3,
        WAITS=waits,
        num_warps=8,
        num_stages=3,
    )
    return y


def fused_gated(
    gate: Tensor, up: Tensor | None, cu_seqlens: Tensor, output_format: InputFormat, programs: int
) -> Tensor:
    """silu(gate) * up, [1, T, N], or without `up` the first alone as it is."""
    y = torch.empty(gate.shape, dtype=output_format.dtype, device=gate.device)
    if not y.numel():
        return y
    _gated[(4 * programs,)](
        gate.contiguous(),
        gate if up is None else up.contiguous(),
        y,
        cu_seqlens,
        output_format.scale,
        len(cu_seqlens) - 1,
        *gate.shape[1:],
        GATED=up is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return y


@triton.jit(do_not_specialize=["last", "capacity"])
def _product(
    small_x,
    tall_x,
    x,
    small_weight,
    weight,
    wide_weight,
    y,
    wide_y,
    x_ptr,
    weight_ptr,
    y_ptr,
    bias_ptr,
    cu_seqlens_ptr,
    sums_ptr,
    counters_ptr,
    scale,
    y_scale,
    last,
    capacity,
    N,
    K,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SMALL_BLOCK_K: tl.constexpr,
    SMALL_STAGES: tl.constexpr,
    TALL_STAGES: tl.constexpr,
    STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):
    tl.assume(K > 0)
    total = tl.minimum(tl.load(cu_seqlens_ptr + last), capacity)
    best = _cheapest(total, N, K, TMA, x_ptr.dtype.element_ty.primitive_bitwidth, BLOCK_K, SMALL_BLOCK_K)
    size, splits = best // MAX_SPLITS, best % MAX_SPLITS + 1
    ptrs = x_ptr, weight_ptr, y_ptr, bias_ptr
    numbers = total, N, K, scale, y_scale
    sums = sums_ptr, counters_ptr, splits
    if size == SMALL_TILE:
        # One loop for both: of small tiles hardly any program takes a second one.
        _split_tiles(
            small_x, small_weight, *ptrs, *sums, *numbers, BIAS, GELU, TMA, WAITS, 64, 64, SMALL_BLOCK_K, SMALL_STAGES
        )
    elif size == SQUARE_TILE:
        if splits == 1:
            _whole_tiles(x, weight, y, *ptrs, *numbers, BIAS, GELU, TMA, 128, 128, BLOCK_K)
        else:
            _split_tiles(x, weight, *ptrs, *sums, *numbers, BIAS, GELU, TMA, WAITS, 128, 128, BLOCK_K, STAGES)
    elif TMA:
        if size == TALL_TILE:
            _split_tiles(
                tall_x,
                small_weight,
                *ptrs,
                *sums,
                *numbers,
                BIAS,
                GELU,
                TMA,
                WAITS,
                128,
                64,
                SMALL_BLOCK_K,
                TALL_STAGES,
            )
        elif splits == 1:
            _whole_tiles(x, wide_weight, wide_y, *ptrs, *numbers, BIAS, GELU, TMA, 128, 256, BLOCK_K)
        else:
            _split_tiles(x, wide_weight, *ptrs, *sums, *numbers, BIAS, GELU, TMA, WAITS, 128, 256, BLOCK_K, 4)


@triton.jit
def _cheapest(total, N, K, TMA: tl.constexpr, BITS: tl.constexpr, BLOCK_K: tl.constexpr, SMALL_BLOCK_K: tl.constexpr):
    """The plan that takes least time: size of the tiles * MAX_SPLITS + splits - 1. All are compared at once, a thread
    each. Microseconds are those that an H200 was measured to take."""
    plan = tl.arange(0, 4 * MAX_SPLITS)
    size, splits = plan // MAX_SPLITS, plan % MAX_SPLITS + 1
    rows, width = _per_size(size, 64, 128, 128, 128), _per_size(size, 64, 64, 128, 256)
    tiles = ((total + rows - 1) // rows) * ((N + width - 1) // width)
    programs = tl.num_programs(0)
    rounds = (tiles * splits + programs - 1) // programs
    # Once; for every tile; and for 2048 channels of one in 16 bits.
    once, each_tile = _per_size(size, 2.8, 3.0, 2.0, 1.6), _per_size(size, 1.4, 1.0, 0.0, 4.1)
    channels = _per_size(size, 6.7, 11.0, 16.7, 19.0) * (K * BITS / (2048.0 * 16))
    # To wait for all splits; and for their sums.
    wait = _per_size(size, 1.2, 1.8, 3.8, 6.0)
    read = _per_size(size, 0.2, 0.2, 0.5, 0.5) * tl.minimum(total, rows) / rows
    cost = once + rounds * (each_tile + channels / splits) + tl.where(splits > 1, wait + read * splits, 0.0)
    # A program splits one tile at most: so every program has a place for its sums, and none waits for a second round.
    block_k = _per_size(size, SMALL_BLOCK_K, SMALL_BLOCK_K, BLOCK_K, BLOCK_K)
    fits = (splits == 1) | ((tiles * splits <= programs) & (splits <= (K + block_k - 1) // block_k))
    # Before Hopper, some tiles need more memory than there is.
    fits &= TMA | (size == SMALL_TILE) | (size == SQUARE_TILE)
    # With few tokens, reading the weights takes longest, and small tiles read them with most programs.
    fits &= (size == SMALL_TILE) | (total > 64)
    return tl.argmin(tl.where(fits, cost, float("inf")), 0)


@triton.jit
def _per_size(size, small, tall, square, wide):
    """The value for tiles of a size."""
    large = tl.where(size == SQUARE_TILE, square, wide)
    return tl.where(size == SMALL_TILE, small, tl.where(size == TALL_TILE, tall, large))


@triton.jit
def _whole_tiles(
    x,
    weight,
    y,
    x_ptr,
    weight_ptr,
    y_ptr,
    bias_ptr,
    total,
    N,
    K,
    scale,
    y_scale,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute tiles one after the other; while one is written, the next is on its way.

    With two sums, for 192 channels, ptxas lets no product of the whole kernel run beside another (C7515)."""
    down, across = tl.cdiv(total, ROWS), tl.cdiv(N, WIDTH)
    programs, done = tl.num_programs(0), tl.program_id(0)
    for tile in tl.range(tl.program_id(0), down * across, programs, flatten=True):
        row, channel = _locate_tile(tile, down, across, ROWS, WIDTH)
        sums = tl.zeros((ROWS, WIDTH), tl.float32)
        for source in tl.range(0, K, BLOCK_K):
            a = _load_tile(x, x_ptr, row, total, source, K, ROWS, BLOCK_K, TMA)
            b = _load_tile(weight, weight_ptr, channel, N, source, K, WIDTH, BLOCK_K, TMA)
            sums = tl.dot(a, b.T, sums)
        # Counted once more, so that what is written does not keep back what is fetched.
        row, channel = _locate_tile(done, down, across, ROWS, WIDTH)
        done += programs
        result = _epilogue(sums, scale, bias_ptr, channel, N, y_scale, y_ptr.dtype.element_ty, BIAS, GELU, WIDTH)
        if TMA:  # writes behind the last token, too, where nobody reads, but never beside the tensor
            y.store([row, channel], result)
        else:
            _store_tile(y_ptr, result, row, total, channel, N, ROWS, WIDTH)


@triton.jit
def _split_tiles(
    x,
    weight,
    x_ptr,
    weight_ptr,
    y_ptr,
    bias_ptr,
    sums_ptr,
    counters_ptr,
    splits,
    total,
    N,
    K,
    scale,
    y_scale,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    WAITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute splits of tiles, which the tile's programs add up together, or the last of them alone.

    That they wait for each other never ends in waiting for a program that has no place to run: the grid has no more
    programs than the GPU has SMs, each of which has the memory for one; a program splits one tile at most; and none
    that waits has anything to do that others wait for."""
    CHUNK: tl.constexpr = ROWS // 4  # tokens that are added up at once, for there are only so many registers
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    down, across = tl.cdiv(total, ROWS), tl.cdiv(N, WIDTH)
    tiles, steps = down * across, tl.cdiv(K, BLOCK_K)
    for item in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        tile, split = item % tiles, item // tiles
        row, channel = _locate_tile(tile, down, across, ROWS, WIDTH)
        sums = tl.zeros((ROWS, WIDTH), tl.float32)
        for step in tl.range(split * steps // splits, (split + 1) * steps // splits, num_stages=STAGES):
            a = _load_tile(x, x_ptr, row, total, step * BLOCK_K, K, ROWS, BLOCK_K, TMA)
            b = _load_tile(weight, weight_ptr, channel, N, step * BLOCK_K, K, WIDTH, BLOCK_K, TMA)
            sums = tl.dot(a, b.T, sums)
        if splits == 1:
            result = _epilogue(sums, scale, bias_ptr, channel, N, y_scale, dtype, BIAS, GELU, WIDTH)
            _store_tile(y_ptr, result, row, total, channel, N, ROWS, WIDTH)
        else:
            inside = tl.arange(0, ROWS)
            to = sums_ptr + item * (ROWS * WIDTH) + inside[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            tl.store(to, sums, mask=(row + inside < total)[:, None])
            tl.debug_barrier()  # all threads have written before one says so
            chunks = tl.cdiv(tl.minimum(total - row, ROWS), CHUNK)
            if WAITS:
                _wait(counters_ptr + tile, split, splits)
                first, stride = split, splits
            else:
                first, stride = chunks, 1
                if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == splits - 1:
                    first = 0
                    tl.store(counters_ptr + tile, 0)  # for the next call
            for chunk in range(first, chunks, stride):
                own = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
                offset = tile * (ROWS * WIDTH) + own * WIDTH + tl.arange(0, WIDTH)[None, :]
                added = tl.zeros((CHUNK, WIDTH), tl.float32)
                for base in range(0, splits, 4):
                    for other in tl.static_range(4):  # loads do not wait for sums
                        there = sums_ptr + (base + other) * tiles * (ROWS * WIDTH) + offset
                        real = row + own < tl.where(base + other < splits, total, 0)
                        # Not from the cache of this SM, which does not hear of others.
                        added += tl.load(there, mask=real, other=0.0, cache_modifier=".cg")
                result = _epilogue(added, scale, bias_ptr, channel, N, y_scale, dtype, BIAS, GELU, WIDTH)
                _store_tile(y_ptr, result, row + chunk * CHUNK, total, channel, N, CHUNK, WIDTH)


@triton.jit
def _wait(at, split, splits):
    """Wait until all splits are here. The first adds 2 ** 31 less what the others add: so the top bit flips once all
    have come, the rest is zero again, and nothing is to clean up for the next call."""
    TOP: tl.constexpr = -2147483648
    before = tl.atomic_add(at, tl.where(split == 0, TOP - (splits - 1), 1), sem="acq_rel")
    now = before
    while (now ^ before) >= 0:
        now = tl.atomic_add(at, 0, sem="acquire")


@triton.jit
def _locate_tile(tile, down, across, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The first token and channel of a tile. Consecutive ones share tokens and weights: 16 tiles of tokens at
    most, then the next channels."""
    GROUP: tl.constexpr = 16
    before = tile // (GROUP * across) * GROUP
    there = tl.minimum(down - before, GROUP)
    inside = tile % (GROUP * across)
    return (before + inside % there) * ROWS, inside // there * WIDTH


@triton.jit
def _load_tile(descriptor, ptr, row, rows, channel, K, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, BLOCK_K] of a matrix with so many rows. Anything may lie behind the last token: it stays in its row."""
    if TMA:
        return descriptor.load([row, channel])
    rank = row + tl.arange(0, ROWS)
    source = channel + tl.arange(0, BLOCK_K)
    ptrs = ptr + rank[:, None].to(tl.int64) * K + source[None, :]
    return tl.load(ptrs, mask=(rank < rows)[:, None] & (source < K)[None, :], other=0.0)


@triton.jit
def _epilogue(
    sums,
    scale,
    bias_ptr,
    channel,
    N,
    y_scale,
    dtype: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    WIDTH: tl.constexpr,
):
    result = sums * scale
    if BIAS:
        channels = channel + tl.arange(0, WIDTH)
        result += tl.load(bias_ptr + channels, mask=channels < N, other=0.0).to(tl.float32)[None, :]
    if GELU:  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        result *= tl.sigmoid(1.5957691216057308 * (result + 0.044715 * result * result * result))
    return cast(result, y_scale, dtype)


@triton.jit
def _store_tile(y_ptr, result, row, total, channel, N, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rank = row + tl.arange(0, ROWS)
    channels = channel + tl.arange(0, WIDTH)
    ptrs = y_ptr + rank[:, None].to(tl.int64) * N + channels[None, :]
    tl.store(ptrs, result, mask=(rank < total)[:, None] & (channels < N)[None, :])


@triton.jit(do_not_specialize=["last", "capacity"])
def _gated(
    gate_ptr, up_ptr, y_ptr, cu_seqlens_ptr, scale, last, capacity, width, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    count = tl.minimum(tl.load(cu_seqlens_ptr + last), capacity).to(tl.int64) * width
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        real = at < count
        result = tl.load(gate_ptr + at, mask=real, other=0.0).to(tl.float32)
        if GATED:
            result *= tl.sigmoid(result) * tl.load(up_ptr + at, mask=real, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, cast(result, scale, y_ptr.dtype.element_ty), mask=real)
