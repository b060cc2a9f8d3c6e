"""Pages of a KV cache (`pages.py`) as kernels see them: where one begins, and who takes new ones.

Nobody counts with atomics: how many pages every row needs follows from lengths and new tokens, which all programs can
read, so each of them knows by itself which pages its tokens go to.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page(table_at, number, real):
    """Where a page of a row begins, in elements from the first page on; memory is aligned to more than 16 of them."""
    return tl.multiple_of(tl.load(table_at + number, mask=real, other=0), 16)


@triton.jit
def pages_of_rows(length_at, count, rows, ROWS: tl.constexpr, PAGE: tl.constexpr):
    """Pages that rows have, [ROWS], and how many they need for `count` tokens more."""
    every = tl.arange(0, ROWS)
    length = tl.load(length_at + every, mask=every < rows, other=0).to(tl.int32)
    held = tl.cdiv(length, PAGE)
    return held, tl.cdiv(length + count, PAGE) - held


@triton.jit
def place_in_pages(
    position, real, held, first, table_at, free_at, WIDTH: tl.constexpr, PAGE: tl.constexpr
):  # all but the last four are [TOKENS, 1], or numbers
    """Where tokens of these positions in their rows go. A row has `held` pages, of which the last may not be full; new
    ones are those that are free from the `first` one on."""
    number = position // PAGE
    old = tl.load(table_at + number, mask=real & (number < held), other=0)
    new = tl.load(free_at + (first + number - held), mask=real & (number >= held), other=0)
    return tl.multiple_of(old + new, (16, 16)) + position % PAGE * WIDTH


@triton.jit
def hand_out(
    row,
    rows,
    held,
    need,
    table_at,
    table_row,
    free_at,
    before_at,
    after_at,
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """A row's new pages, into its table; who does it for the last row tells how many pages are taken now."""
    every = tl.arange(0, ROWS)
    has = tl.sum(tl.where(every == row, held, 0), 0)
    new = tl.sum(tl.where(every == row, need, 0), 0)
    first = tl.load(before_at) + tl.sum(tl.where(every < row, need, 0), 0)
    number = tl.arange(0, PAGES)
    found = tl.load(free_at + first + number, mask=number < new, other=0)
    tl.store(table_at + row * table_row + has + number, found, mask=number < new)
    if row == rows - 1:
        tl.store(after_at, first + new)
