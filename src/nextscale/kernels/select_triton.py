"""A program per row. The lowest score that stays is found bit by bit, then running sums give every cell its slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 16384  # cells that a program can hold


def fused_select(score: Tensor, count: Tensor, slots: int) -> Tensor:
    """Cells [R, slots] of highest score [R, N] in raster order, of equal ones the earlier; padding is the last cell."""
    rows, cells = score.shape
    index = torch.empty(rows, slots, dtype=torch.long, device=score.device)
    block = triton.next_power_of_2(cells)
    _select[(rows,)](
        score.float().contiguous(),
        count,
        index,
        cells,
        slots,
        BLOCK=block,
        SLOTS=triton.next_power_of_2(slots),
        num_warps=min(max(block // 512, 1), 16),
    )
    return index


@triton.jit
def _select(score_at, count_at, index_at, cells, slots, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cell = tl.arange(0, BLOCK)
    real = cell < cells
    score = tl.load(score_at + row * cells + cell, mask=real, other=0.0) + 0.0  # there is but one zero
    bits = score.to(tl.int32, bitcast=True)
    # As whole numbers from 0 on, in the order of the scores; what is no cell is below all of them.
    number = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    number = tl.where(real, number, 0)
    count = tl.minimum(tl.load(count_at + row).to(tl.int32), slots)
    lowest = tl.zeros((), tl.uint32)
    for n in tl.static_range(32):
        higher = lowest | (tl.full((), 1, tl.uint32) << (31 - n))
        enough = tl.sum((number >= higher).to(tl.int32), 0) >= count
        lowest = tl.where(enough, higher, lowest)
    above = (number > lowest) & real
    equal = (number == lowest) & real
    left = count - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(index_at + row * slots + place, cell.to(tl.int64), mask=chosen & (place < slots))
    slot = tl.arange(0, SLOTS)
    padding = (slot >= count) & (slot < slots)
    tl.store(index_at + row * slots + slot, tl.full((SLOTS,), 0, tl.int64) + cells - 1, mask=padding)
