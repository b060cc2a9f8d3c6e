"""A program per image finds the lowest score that stays, two bits at a time; then running sums give the position of
every cell. Where there are several images, another kernel packs their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton

if TYPE_CHECKING:
    from nextscale.methods.nova.layer_linkage import LayerLinkage

MAX_CELLS = 16384  # that a program can hold
BLOCK = 1024  # cells that a program packs

PackedIndices = tuple[Tensor, Tensor, Tensor]  # cell, start and slot of a `Packed` selection


def fused_select(score: Tensor, count: Tensor, copies: int = 1) -> PackedIndices:
    """The `count` [B] cells of highest score [B, N] in raster order, of equal ones the earlier; `copies` times, row r
    being of image r % B."""
    images, cells = score.shape
    found, written, final_copies = _allocate(score, copies)
    _select[(images,)](
        score.float().contiguous(), count.contiguous(), *written, cells, COPIES=final_copies, **_blocks(cells)
    )
    return _pack_rows(found, written, images, copies)


def fused_link_and_select(
    entropy: Tensor,
    score: Tensor,
    ratio: Tensor,
    layer_stats: Tensor,
    layer: int,
    rule: LayerLinkage,
    copies: int,
    mean: Tensor | None = None,
) -> PackedIndices:
    """Find the count as `LayerLinkage.keep` does, then select."""
    images, cells = entropy.shape
    found, written, final_copies = _allocate(score, copies)
    _link_and_select[(images,)](
        entropy.contiguous() if mean is None else mean,
        score.float().contiguous(),
        ratio,
        layer_stats,
        *written,
        cells,
        images,
        layer,
        rule.first,
        *_split_float(rule.lowest),
        LINKED=rule.linked,
        MEAN_KNOWN=mean is not None,
        ROUNDS=rule.rounds,
        COPIES=final_copies,
        LAYERS=triton.next_power_of_2(len(layer_stats)),
        **_blocks(cells),
    )
    return _pack_rows(found, written, images, copies)


def _allocate(score: Tensor, copies: int) -> tuple[PackedIndices, PackedIndices, int]:
    """Tensors for the result, and those that a program per image writes: the result itself if there is but one image,
    for so many copies; otherwise counts and ranks of each image, for none."""
    images, cells = score.shape

    def empty_int32(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=score.device)

    rows = images * copies
    found = empty_int32(rows * cells), empty_int32(rows + 1), empty_int32(rows, cells)
    if images == 1:
        return found, found, copies
    return found, (found[0], empty_int32(images), empty_int32(images, cells)), 0


def _pack_rows(found: PackedIndices, written: PackedIndices, images: int, copies: int) -> PackedIndices:
    if images > 1:
        cells = found[2].shape[1]
        _pack[(triton.cdiv(cells, BLOCK), images * copies)](
            *written[1:], *found, images, cells, IMAGES=triton.next_power_of_2(images), BLOCK=BLOCK, num_warps=4
        )
    return found


def _split_float(number: float) -> tuple[float, float]:
    """Two numbers in float32, as Triton takes them, with the digits of one in float64."""
    first = torch.tensor(number, dtype=torch.float32).item()
    return first, number - first


def _blocks(cells: int) -> dict[str, int]:
    block = triton.next_power_of_2(cells)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


@triton.jit
def _select_top(score, real, count, cell_ptr, start_ptr, slot_ptr, image, cells, BLOCK, COPIES: tl.constexpr):
    """Select the `count` cells of highest score."""
    cell = tl.arange(0, BLOCK)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # there is but one zero
    # As integers from 0 on, in the order of the scores; padding is below all of them.
    number = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    number = tl.where(real, number, 0)
    # Bits that all of them share need no search.
    largest = tl.max(number, 0)
    shared = largest ^ tl.min(tl.where(real, number, largest), 0)
    one = tl.full((), 1 << 30, tl.uint32)
    while (one > 1) & (shared < one):
        one = one >> 2
    lowest = largest - (largest & (3 * one + (one - 1)))
    many = cells  # are at least `lowest`; as soon as they are as many as are wanted, it is found
    while (one > 0) & (many != count):
        # How many are at least lowest + 1, + 2, + 3 of these two bits: three numbers in one sum.
        first = (number >= lowest + one).to(tl.int64)
        second = (number >= lowest + 2 * one).to(tl.int64)
        third = (number >= lowest + 3 * one).to(tl.int64)
        sums = tl.sum(first + (second << 20) + (third << 40), 0)
        for digit in tl.static_range(3):
            least = ((sums >> (20 * digit)) & 0xFFFFF).to(tl.int32)
            enough = least >= count
            lowest += tl.where(enough, one, 0)
            many = tl.where(enough, least, many)
        one = one >> 2
    above = (number > lowest) & real
    equal = (number == lowest) & real
    remaining = count - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= remaining))
    position = tl.cumsum(chosen.to(tl.int32), 0) - 1
    if COPIES:
        for copy in tl.static_range(COPIES):
            first = copy * count
            tl.store(cell_ptr + first + position, copy * cells + cell, mask=chosen)
            tl.store(slot_ptr + copy * cells + cell, tl.where(chosen, first + position, -1), mask=real)
            tl.store(start_ptr + copy, first)
        tl.store(start_ptr + COPIES, COPIES * count)
    else:
        tl.store(slot_ptr + image * cells + cell, tl.where(chosen, position, -1), mask=real)
        tl.store(start_ptr + image, count)


@triton.jit(do_not_specialize=["images", "cells"])
def _pack(count_ptr, rank_ptr, cell_ptr, start_ptr, slot_ptr, images, cells, IMAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Pack some cells of a row; its tokens lie behind those of the rows before."""
    row = tl.program_id(1)
    image = row % images
    other = tl.arange(0, IMAGES)
    count = tl.load(count_ptr + other, mask=other < images, other=0)
    first = row // images * tl.sum(count, 0) + tl.sum(tl.where(other < image, count, 0), 0)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = cell < cells
    rank = tl.load(rank_ptr + image * cells + cell, mask=real, other=-1)
    chosen = rank >= 0
    tl.store(slot_ptr + row * cells + cell, tl.where(chosen, first + rank, -1), mask=real)
    tl.store(cell_ptr + first + rank, row * cells + cell, mask=chosen)
    if tl.program_id(0) == 0:
        tl.store(start_ptr + row, first)
        end = first + tl.sum(tl.where(other == image, count, 0), 0)
        tl.store(start_ptr + row + 1, end, mask=row + 1 == tl.num_programs(1))


@triton.jit(do_not_specialize=["cells"])
def _select(score_ptr, count_ptr, cell_ptr, start_ptr, slot_ptr, cells, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    image = tl.program_id(0)
    cell = tl.arange(0, BLOCK)
    real = cell < cells
    score = tl.load(score_ptr + image.to(tl.int64) * cells + cell, mask=real, other=0.0)
    count = tl.minimum(tl.load(count_ptr + image).to(tl.int32), cells)
    _select_top(score, real, count, cell_ptr, start_ptr, slot_ptr, image, cells, BLOCK, COPIES)


@triton.jit(do_not_specialize=["cells", "images", "layer", "first"])
def _link_and_select(
    entropy_ptr,  # of every cell, or its mean
    score_ptr,
    ratio_ptr,
    layer_stats_ptr,
    cell_ptr,
    start_ptr,
    slot_ptr,
    cells,
    images,
    layer,
    first,
    lowest,
    lowest_rest,
    LINKED: tl.constexpr,
    MEAN_KNOWN: tl.constexpr,
    ROUNDS: tl.constexpr,
    COPIES: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0)
    cell = tl.arange(0, BLOCK)
    real = cell < cells
    at = image.to(tl.int64) * cells + cell
    if MEAN_KNOWN:
        mean = tl.load(entropy_ptr + image).to(tl.float64)
    else:
        mean = tl.sum(tl.load(entropy_ptr + at, mask=real, other=0.0).to(tl.float64), 0) / cells
    scale_ratio = tl.load(ratio_ptr + image)
    deviation = tl.zeros((), tl.float64)
    if LINKED:
        other = tl.arange(0, LAYERS)
        counted = (other >= first) & (other < layer)
        before = tl.sum(tl.load(layer_stats_ptr + other * 4 * images + image, mask=counted, other=0.0), 0)
        if (layer > first) & (before != 0.0):
            mean_before = before / (layer - first)
            deviation = (mean - mean_before) / mean_before
            deviation = tl.where(deviation - deviation == 0, deviation, 0.0)  # as if it were finite
    one = tl.full((), 1.0, tl.float64)
    ratio = tl.maximum(scale_ratio * (one - deviation), lowest * one + lowest_rest)
    ratio = tl.minimum(ratio, one)
    ratio = tl.where(scale_ratio > 0, ratio, scale_ratio)
    if ROUNDS:
        kept = tl.floor((one - ratio) * cells + 0.5).to(tl.int32)
    else:
        kept = tl.maximum(cells - tl.floor(ratio * cells).to(tl.int32), 1)
    stats_ptr = layer_stats_ptr + layer * 4 * images + image
    tl.store(stats_ptr, mean)
    tl.store(stats_ptr + images, ratio)
    tl.store(stats_ptr + 2 * images, deviation)
    tl.store(stats_ptr + 3 * images, kept.to(tl.float64))
    score = tl.load(score_ptr + at, mask=real, other=0.0)
    count = tl.minimum(kept, cells)
    _select_top(score, real, count, cell_ptr, start_ptr, slot_ptr, image, cells, BLOCK, COPIES)
