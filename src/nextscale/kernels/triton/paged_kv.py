"""Pages of a KV cache (`cache/paged.py`): where one begins, and who takes new ones.

No atomics count them: how many pages every row needs follows from lengths and new tokens, which all programs can read,
so each of them knows by itself which pages its tokens go to.
"""

from __future__ import annotations

from nextscale.kernels.dispatch import tl, triton


@triton.jit
def page_offset(table_ptr, number, real):
    """The offset of a page of a row from the first page, in elements; memory is aligned to more than 16 of them."""
    return tl.multiple_of(tl.load(table_ptr + number, mask=real, other=0), 16)


@triton.jit
def count_pages(length_ptr, count, rows, ROWS: tl.constexpr, PAGE: tl.constexpr):
    """How many pages rows have, [ROWS], and how many new ones they need for `count` more tokens."""
    all_rows = tl.arange(0, ROWS)
    length = tl.load(length_ptr + all_rows, mask=all_rows < rows, other=0).to(tl.int32)
    held = tl.cdiv(length, PAGE)
    return held, tl.cdiv(length + count, PAGE) - held


@triton.jit
def offset_in_pages(
    position, real, held, first, table_ptr, free_ptr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr
):  # all but the last four are [TOKENS, 1], or numbers
    """Offsets of tokens at these positions of their rows. A row has `held` pages, of which the last may not be full;
    new ones are the free ones from the `first` on."""
    number = position // PAGE
    old = tl.load(table_ptr + number, mask=real & (number < held), other=0)
    new = tl.load(free_ptr + (first + number - held), mask=real & (number >= held), other=0)
    return tl.multiple_of(old + new, (16, 16)) + position % PAGE * HEAD_DIM


@triton.jit
def allocate_pages(
    row,
    rows,
    held,
    needed,
    table_ptr,
    table_row,
    free_ptr,
    before_ptr,
    after_ptr,
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Write a row's new pages into its table; for the last row, also how many pages are taken now."""
    all_rows = tl.arange(0, ROWS)
    row_pages = tl.sum(tl.where(all_rows == row, held, 0), 0)
    new = tl.sum(tl.where(all_rows == row, needed, 0), 0)
    first = tl.load(before_ptr) + tl.sum(tl.where(all_rows < row, needed, 0), 0)
    number = tl.arange(0, PAGES)
    offsets = tl.load(free_ptr + first + number, mask=number < new, other=0)
    tl.store(table_ptr + row * table_row + row_pages + number, offsets, mask=number < new)
    if row == rows - 1:
        tl.store(after_ptr, first + new)
