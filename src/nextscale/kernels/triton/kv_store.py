"""One program takes some tokens and one of their heads.

A row has all tokens of a complete scale. Chosen tokens lie packed, and only the device knows how many there are: then
there are always as many programs, and each takes tokens until none are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.occupancy import num_sms
from nextscale.kernels.triton.flash_tiles import count_tokens
from nextscale.kernels.triton.paged_kv import allocate_pages, count_pages, offset_in_pages

if TYPE_CHECKING:
    from nextscale.cache.paged import LayerPageTable
    from nextscale.methods.selection import Packed
    from nextscale.models.layers import SelfAttention

SMALL_BLOCK_LIMIT, SMALL_BLOCK, LARGE_BLOCK = 256, 8, 16  # tokens of a scale; of a program, up to that limit; beyond
PROGRAMS_PER_SM = 4  # where tokens lie packed
NO_ROTATION, ROTATE_PAIRS, ROTATE_HALVES = 0, 1, 2


def split_and_store(
    attn: SelfAttention,
    qkv: Tensor,
    positions: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    chosen: Packed | None = None,
    pages: LayerPageTable | None = None,
) -> Tensor:
    """Return the queries [R, H, K, D] of qkv [R, K, 3, H, D], and store keys and values in the cache [R, H, S, D] from
    `start` on, a number or one for each row [R]. If they go to `pages`, rows take as many new ones as they need.

    `positions` are [1 or R, K, ...]. `chosen` tokens have those of all tokens, [1 or R, N, ...]: then qkv is
    [1, T, 3, H, D], and queries are [1, H, T, D]. Nothing behind the last token is stored.
    """
    rows, tokens, _, heads, head_dim = qkv.shape
    q = torch.empty(rows, tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)  # attention keeps this order
    block = SMALL_BLOCK if tokens <= SMALL_BLOCK_LIMIT or chosen is not None else LARGE_BLOCK
    blocks = triton.cdiv(tokens, block)
    grid: tuple[int, ...] = (blocks, heads, rows)
    if chosen is not None:
        grid = (max(min(PROGRAMS_PER_SM * num_sms(qkv.device), blocks * heads), 1),)
    count, paged = (rows if chosen is None else len(chosen.slot)), (qkv, qkv, qkv, qkv, 0)
    if pages is not None:
        assert isinstance(start, Tensor), "only the device knows how full pages are"
        paged = pages.table, pages.free, pages.before, pages.after, pages.table.stride(0)
    rotation = NO_ROTATION if positions is None else ROTATE_PAIRS if attn.pairs else ROTATE_HALVES
    (_complete if chosen is None else _packed)[grid](
        qkv,
        q,
        keys,
        values,
        qkv if attn.log_scale is None else attn.log_scale,
        qkv if positions is None else positions,
        start if isinstance(start, Tensor) else qkv,
        *(() if chosen is None else (chosen.cell, chosen.start)),
        *paged,
        count,
        tokens if chosen is None else chosen.slot.shape[1],
        heads,
        0 if isinstance(start, Tensor) else start,
        0 if positions is None or len(positions) == 1 else positions.stride(0),
        *keys.stride()[:3],
        HEAD_DIM=head_dim,
        COSINE=attn.log_scale is not None,
        ROTATION=rotation,
        HAS_STARTS=isinstance(start, Tensor),
        TOKENS=block,
        PAGED=pages is not None,
        PAGE=1 if pages is None else pages.size,
        PAGES=1 if pages is None else triton.next_power_of_2(pages.table.shape[1]),
        ROWS=1 if pages is None else triton.next_power_of_2(count),
        num_warps=4,
    )
    return q.transpose(1, 2)


@triton.jit
def _split(
    token,
    real,
    head,
    heads,
    to,
    position,
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    log_scale_ptr,
    position_ptr,
    HEAD_DIM: tl.constexpr,
    COSINE: tl.constexpr,
    ROTATION: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Split tokens `token` [TOKENS, 1]: keys and values go to the offsets `to` of the cache; `position` is where their
    cosines and sines lie."""
    channel = tl.arange(0, HEAD_DIM)[None, :]
    # [.., 3, H, D]: a token has all its queries, then its keys, then its values.
    at = qkv_ptr + (token * 3 * heads + head) * HEAD_DIM + channel
    value = tl.load(at + 2 * heads * HEAD_DIM, mask=real, other=0.0)
    # 0, 1 or 2: not rotated, adjacent pairs, or halves.
    if ROTATION > 0:
        both = tl.load(position_ptr + position + tl.arange(0, ROTATION * HEAD_DIM)[None, :], mask=real, other=0.0)
        cos, sin = tl.split(tl.reshape(both, (TOKENS, ROTATION * HEAD_DIM // 2, 2)))
    for part in tl.static_range(2):
        x = tl.load(at + part * heads * HEAD_DIM, mask=real, other=0.0).to(tl.float32)
        if COSINE:
            factor = 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1))[:, None], 1e-12)
            if part == 0:
                factor *= tl.exp(tl.minimum(tl.load(log_scale_ptr + head), 4.605170185988092))
            x *= factor
        if ROTATION == 1:
            even, odd = tl.split(tl.reshape(x, (TOKENS, HEAD_DIM // 2, 2)))
            x = tl.interleave(cos * even - sin * odd, sin * even + cos * odd)
        if ROTATION == 2:
            first, second = tl.split(tl.permute(tl.reshape(x, (TOKENS, 2, HEAD_DIM // 2)), (0, 2, 1)))
            across = tl.permute(tl.join(-second, first), (0, 2, 1))
            x = x * cos + tl.reshape(across, (TOKENS, HEAD_DIM)) * sin
        if part == 0:
            tl.store(q_ptr + (token * heads + head) * HEAD_DIM + channel, x.to(q_ptr.dtype.element_ty), mask=real)
        else:
            tl.store(k_ptr + to + channel, x.to(k_ptr.dtype.element_ty), mask=real)
    tl.store(v_ptr + to + channel, value, mask=real)


@triton.jit(do_not_specialize=["table_row", "rows", "tokens", "start"])
def _complete(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    log_scale_ptr,
    position_ptr,
    start_ptr,
    table_ptr,
    free_ptr,
    before_ptr,
    after_ptr,
    table_row,
    rows,
    tokens,
    heads,
    start,
    position_row,
    cache_row,
    cache_head,
    cache_token,
    HEAD_DIM: tl.constexpr,
    COSINE: tl.constexpr,
    ROTATION: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rank = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    if HAS_STARTS:
        start = tl.load(start_ptr + row)
    position = row * position_row + rank * (ROTATION * HEAD_DIM)
    token, real = row * tokens + rank, rank < tokens
    if PAGED:
        all_rows = tl.arange(0, ROWS)
        held, needed = count_pages(start_ptr, tl.where(all_rows < rows, tokens, 0), rows, ROWS, PAGE)
        first = tl.load(before_ptr) + tl.sum(tl.where(all_rows < row, needed, 0), 0)
        row_pages, row_table = tl.cdiv(start, PAGE), table_ptr + row * table_row
        to = (
            offset_in_pages(start + rank, real, row_pages, first, row_table, free_ptr, HEAD_DIM, PAGE)
            + head * cache_head
        )
        if tl.program_id(0) + head == 0:
            allocate_pages(row, rows, held, needed, table_ptr, table_row, free_ptr, before_ptr, after_ptr, ROWS, PAGES)
    else:
        to = (start + rank) * cache_token + row * cache_row + head * cache_head
    _split(
        token,
        real,
        head,
        heads,
        to,
        position,
        qkv_ptr,
        q_ptr,
        k_ptr,
        v_ptr,
        log_scale_ptr,
        position_ptr,
        HEAD_DIM,
        COSINE,
        ROTATION,
        TOKENS,
    )


@triton.jit(do_not_specialize=["table_row", "rows", "cells", "start"])
def _packed(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    log_scale_ptr,
    position_ptr,
    start_ptr,
    cell_ptr,
    first_ptr,
    table_ptr,
    free_ptr,
    before_ptr,
    after_ptr,
    table_row,
    rows,
    cells,
    heads,
    start,
    position_row,
    cache_row,
    cache_head,
    cache_token,
    HEAD_DIM: tl.constexpr,
    COSINE: tl.constexpr,
    ROTATION: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    total = tl.load(first_ptr + rows)
    all_rows = tl.arange(0, ROWS)
    if PAGED:
        held, needed = count_pages(start_ptr, count_tokens(all_rows, first_ptr, rows), rows, ROWS, PAGE)
        before = tl.load(before_ptr)
        for other in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
            allocate_pages(
                other, rows, held, needed, table_ptr, table_row, free_ptr, before_ptr, after_ptr, ROWS, PAGES
            )
    for unit in tl.range(tl.program_id(0), tl.cdiv(total, TOKENS) * heads, tl.num_programs(0)):
        head = unit % heads  # neighbors read the same tokens
        token = unit // heads * TOKENS + tl.arange(0, TOKENS)[:, None]
        real = token < total
        cell = tl.load(cell_ptr + token, mask=real, other=0)
        row_index = cell // cells
        row = row_index.to(tl.int64)
        begin = tl.load(first_ptr + row, mask=real, other=0)
        length = start
        if HAS_STARTS:
            length = tl.load(start_ptr + row, mask=real, other=0).to(tl.int32)
        rank = token - begin + length
        if PAGED:
            first = before + tl.sum(tl.where(all_rows[None, :] < row_index, needed[None, :], 0), 1)[:, None]
            row_pages, row_table = tl.cdiv(length, PAGE), table_ptr + row * table_row
            to = offset_in_pages(rank, real, row_pages, first, row_table, free_ptr, HEAD_DIM, PAGE) + head * cache_head
        else:
            to = rank * cache_token + row * cache_row + head * cache_head
        position = row * position_row + (cell - row_index * cells) * (ROTATION * HEAD_DIM)
        _split(
            token.to(tl.int64),
            real,
            head,
            heads,
            to,
            position,
            qkv_ptr,
            q_ptr,
            k_ptr,
            v_ptr,
            log_scale_ptr,
            position_ptr,
            HEAD_DIM,
            COSINE,
            ROTATION,
            TOKENS,
        )
