"""A program per row. The lowest score that stays is found two bits at a time, then running sums give every cell its
slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nextscale.methods.linkage import Linkage

MOST = 16384  # cells that a program can hold


def fused_select(score: Tensor, count: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cells [R, slots] of highest score [R, N] in raster order, of equal ones the earlier; padding is the last cell.
    How many they are [R], and the slot of every cell [R, N], -1 where it does not stay."""
    index, kept, slot = _places(score, slots, 1)
    rows, cells = score.shape
    score = score.float().contiguous()
    _select[(rows,)](score, count, index, kept, slot, cells, slots, **_blocks(cells))
    return index, kept, slot


def fused_link_and_select(
    entropy: Tensor,
    score: Tensor,
    ratio: Tensor,
    notes: Tensor,
    layer: int,
    rule: Linkage,
    slots: int,
    copies: int,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the count found first, as `Linkage.keep` does; `copies` times, one below the other."""
    images, cells = entropy.shape
    index, kept, slot = _places(score, slots, copies)
    _link_and_select[(images,)](
        entropy.contiguous() if mean is None else mean,
        score.float().contiguous(),
        ratio,
        notes,
        index,
        kept,
        slot,
        cells,
        slots,
        images,
        layer,
        rule.first,
        *_two(rule.lowest),
        LINKED=rule.linked,
        MEAN_KNOWN=mean is not None,
        EMPTY=rule.empty,
        COPIES=copies,
        LAYERS=triton.next_power_of_2(len(notes)),
        **_blocks(cells),
    )
    return index, kept, slot


def _places(score: Tensor, slots: int, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, cells = score.shape
    index = torch.empty(rows * copies, slots, dtype=torch.long, device=score.device)
    kept = torch.empty(rows * copies, dtype=torch.long, device=score.device)
    slot = torch.empty(rows * copies, cells, dtype=torch.int32, device=score.device)
    return index, kept, slot


def _two(number: float) -> tuple[float, float]:
    """Triton takes numbers in float32: two of them have the digits of one in float64."""
    first = torch.tensor(number, dtype=torch.float32).item()
    return first, number - first


def _blocks(cells: int) -> dict[str, int]:
    block = triton.next_power_of_2(cells)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


@triton.jit
def _keep(score, real, count, index_at, kept_at, slot_at, row, rows, cells, slots, BLOCK, COPIES: tl.constexpr):
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
    padding = (cell >= count) & (cell < slots)
    for copy in tl.static_range(COPIES):
        to = (row + copy * rows).to(tl.int64)
        tl.store(index_at + to * slots + place, cell.to(tl.int64), mask=chosen & (place < slots))
        tl.store(index_at + to * slots + cell, tl.full((BLOCK,), 0, tl.int64) + cells - 1, mask=padding)
        tl.store(slot_at + to * cells + cell, tl.where(chosen, place, -1), mask=real)
        tl.store(kept_at + to, count.to(tl.int64))


@triton.jit(do_not_specialize=["cells", "slots"])
def _select(score_at, count_at, index_at, kept_at, slot_at, cells, slots, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cell = tl.arange(0, BLOCK)
    real = cell < cells
    score = tl.load(score_at + row.to(tl.int64) * cells + cell, mask=real, other=0.0)
    count = tl.minimum(tl.load(count_at + row).to(tl.int32), slots)
    _keep(score, real, count, index_at, kept_at, slot_at, row, 0, cells, slots, BLOCK, 1)


@triton.jit(do_not_specialize=["cells", "slots", "images", "layer", "first"])
def _link_and_select(
    entropy_at,  # of every cell, or its mean
    score_at,
    ratio_at,
    notes_at,
    index_at,
    kept_at,
    slot_at,
    cells,
    slots,
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
    count = tl.minimum(wanted, slots)
    _keep(score, real, count, index_at, kept_at, slot_at, image, images, cells, slots, BLOCK, COPIES)
