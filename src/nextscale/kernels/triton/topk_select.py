"""A program per image. The lowest score that stays is found two bits at a time, then running sums give every cell its
place. Where there are several images, another kernel puts their tokens one behind the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nextscale.methods.nova.layer_linkage import Linkage

MOST = 16384  # cells that a program can hold
BLOCK = 1024  # cells that a program puts into their places

Places = tuple[Tensor, Tensor, Tensor]  # cell, start and slot of a `Packed` selection


def fused_select(score: Tensor, count: Tensor, copies: int = 1) -> Places:
    """The `count` [B] cells of highest score [B, N] in raster order, of equal ones the earlier; `copies` times, row r
    being of image r % B."""
    images, cells = score.shape
    found, written, alone = _places(score, copies)
    _select[(images,)](score.float().contiguous(), count.contiguous(), *written, cells, COPIES=alone, **_blocks(cells))
    return _placed(found, written, images, copies)


def fused_link_and_select(
    entropy: Tensor,
    score: Tensor,
    ratio: Tensor,
    notes: Tensor,
    layer: int,
    rule: Linkage,
    copies: int,
    mean: Tensor | None = None,
) -> Places:
    """The same with the count found first, as `Linkage.keep` does."""
    images, cells = entropy.shape
    found, written, alone = _places(score, copies)
    _link_and_select[(images,)](
        entropy.contiguous() if mean is None else mean,
        score.float().contiguous(),
        ratio,
        notes,
        *written,
        cells,
        images,
        layer,
        rule.first,
        *_two(rule.lowest),
        LINKED=rule.linked,
        MEAN_KNOWN=mean is not None,
        EMPTY=rule.empty,
        COPIES=alone,
        LAYERS=triton.next_power_of_2(len(notes)),
        **_blocks(cells),
    )
    return _placed(found, written, images, copies)


def _places(score: Tensor, copies: int) -> tuple[Places, Places, int]:
    """Room for what is found, and what a program per image writes: the same if there is but one, for so many copies.
    Otherwise, nothing, and the count and the ranks of each image."""
    images, cells = score.shape

    def whole_numbers(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=score.device)

    rows = images * copies
    found = whole_numbers(rows * cells), whole_numbers(rows + 1), whole_numbers(rows, cells)
    if images == 1:
        return found, found, copies
    return found, (found[0], whole_numbers(images), whole_numbers(images, cells)), 0


def _placed(found: Places, written: Places, images: int, copies: int) -> Places:
    if images > 1:
        cells = found[2].shape[1]
        _place[(triton.cdiv(cells, BLOCK), images * copies)](
            *written[1:], *found, images, cells, IMAGES=triton.next_power_of_2(images), BLOCK=BLOCK, num_warps=4
        )
    return found


def _two(number: float) -> tuple[float, float]:
    """Triton takes numbers in float32: two of them have the digits of one in float64."""
    first = torch.tensor(number, dtype=torch.float32).item()
    return first, number - first


def _blocks(cells: int) -> dict[str, int]:
    block = triton.next_power_of_2(cells)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


@triton.jit
def _keep(score, real, count, cell_at, start_at, slot_at, image, cells, BLOCK, COPIES: tl.constexpr):
    """The `count` cells of highest score."""
    cell = tl.arange(0, BLOCK)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # there is but one zero
    # As whole numbers from 0 on, in the order of the scores; what is no cell is below all of them.
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
    left = count - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    if COPIES:
        for copy in tl.static_range(COPIES):
            first = copy * count
            tl.store(cell_at + first + place, copy * cells + cell, mask=chosen)
            tl.store(slot_at + copy * cells + cell, tl.where(chosen, first + place, -1), mask=real)
            tl.store(start_at + copy, first)
        tl.store(start_at + COPIES, COPIES * count)
    else:
        tl.store(slot_at + image * cells + cell, tl.where(chosen, place, -1), mask=real)
        tl.store(start_at + image, count)


@triton.jit(do_not_specialize=["images", "cells"])
def _place(count_at, rank_at, cell_at, start_at, slot_at, images, cells, IMAGES: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes some cells of a row; its tokens lie behind those of the rows before."""
    row = tl.program_id(1)
    image = row % images
    other = tl.arange(0, IMAGES)
    count = tl.load(count_at + other, mask=other < images, other=0)
    first = row // images * tl.sum(count, 0) + tl.sum(tl.where(other < image, count, 0), 0)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = cell < cells
    rank = tl.load(rank_at + image * cells + cell, mask=real, other=-1)
    chosen = rank >= 0
    tl.store(slot_at + row * cells + cell, tl.where(chosen, first + rank, -1), mask=real)
    tl.store(cell_at + first + rank, row * cells + cell, mask=chosen)
    if tl.program_id(0) == 0:
        tl.store(start_at + row, first)
        end = first + tl.sum(tl.where(other == image, count, 0), 0)
        tl.store(start_at + row + 1, end, mask=row + 1 == tl.num_programs(1))


@triton.jit(do_not_specialize=["cells"])
def _select(score_at, count_at, cell_at, start_at, slot_at, cells, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    image = tl.program_id(0)
    cell = tl.arange(0, BLOCK)
    real = cell < cells
    score = tl.load(score_at + image.to(tl.int64) * cells + cell, mask=real, other=0.0)
    count = tl.minimum(tl.load(count_at + image).to(tl.int32), cells)
    _keep(score, real, count, cell_at, start_at, slot_at, image, cells, BLOCK, COPIES)


@triton.jit(do_not_specialize=["cells", "images", "layer", "first"])
def _link_and_select(
    entropy_at,  # of every cell, or its mean
    score_at,
    ratio_at,
    notes_at,
    cell_at,
    start_at,
    slot_at,
    cells,
    images,
    layer,
    first,
    lowest,
    lowest_rest,
    LINKED: tl.constexpr,
    MEAN_KNOWN: tl.constexpr,
    EMPTY: tl.constexpr,
    COPIES: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0)
    cell = tl.arange(0, BLOCK)
    real = cell < cells
    at = image.to(tl.int64) * cells + cell
    if MEAN_KNOWN:
        mean = tl.load(entropy_at + image).to(tl.float64)
    else:
        mean = tl.sum(tl.load(entropy_at + at, mask=real, other=0.0).to(tl.float64), 0) / cells
    asked = tl.load(ratio_at + image)
    deviation = tl.zeros((), tl.float64)
    if LINKED:
        other = tl.arange(0, LAYERS)
        seen = (other >= first) & (other < layer)
        before = tl.sum(tl.load(notes_at + other * 4 * images + image, mask=seen, other=0.0), 0)
        if (layer > first) & (before != 0.0):
            usual = before / (layer - first)
            deviation = (mean - usual) / usual
            deviation = tl.where(deviation - deviation == 0, deviation, 0.0)  # as if it were finite
    one = tl.full((), 1.0, tl.float64)
    ratio = tl.maximum(asked * (one - deviation), lowest * one + lowest_rest)
    ratio = tl.minimum(ratio, one - 1.1102230246251565e-16)  # the largest number below 1
    ratio = tl.where(asked > 0, ratio, asked)
    wanted = cells - tl.floor(ratio * cells).to(tl.int32)
    if not EMPTY:
        wanted = tl.maximum(wanted, 1)
    note = notes_at + layer * 4 * images + image
    tl.store(note, mean)
    tl.store(note + images, ratio)
    tl.store(note + 2 * images, deviation)
    tl.store(note + 3 * images, wanted.to(tl.float64))
    score = tl.load(score_at + at, mask=real, other=0.0)
    count = tl.minimum(wanted, cells)
    _keep(score, real, count, cell_at, start_at, slot_at, image, cells, BLOCK, COPIES)
