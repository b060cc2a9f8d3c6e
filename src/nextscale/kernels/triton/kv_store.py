"""One program takes some tokens and one of their heads.

The tokens of a complete scale are those of a row. Chosen tokens lie packed, and only the device knows how many they
are: then there are always as many programs, and each takes such tokens until none are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.num_sms import processors
from nextscale.kernels.triton.flash_tiles import tokens_of
from nextscale.kernels.triton.paged_kv import hand_out, pages_of_rows, place_in_pages

if TYPE_CHECKING:
    from nextscale.cache.paged import LayerPages
    from nextscale.methods.selection import Packed
    from nextscale.models.layers import SelfAttention

FEW, SMALL, LARGE = 256, 8, 16  # up to so many tokens, a program takes this number of them; else that
AT_ONCE = 4  # programs of a processor when tokens lie packed
STILL, PAIRS, HALVES = 0, 1, 2  # how positions turn queries and keys


def split_and_store(
    attn: SelfAttention,
    qkv: Tensor,
    positions: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    chosen: Packed | None = None,
    pages: LayerPages | None = None,
) -> Tensor:
    """qkv [R, K, 3, H, D] -> queries [R, H, K, D]; keys and values go to the cache [R, H, S, D] from `start` on, which
    rows may each have their own of, [R]. If they go to `pages`, rows take as many new ones as they need.

    The tokens are all of those that `positions` [1 or R, K, ...] belong to, or the `chosen` ones of [1 or R, N, ...]:
    then qkv is [1, T, 3, H, D], and queries are [1, H, T, D]. What lies behind the last of them goes nowhere.
    """
    rows, tokens, _, heads, width = qkv.shape
    q = torch.empty(rows, tokens, heads, width, dtype=qkv.dtype, device=qkv.device)  # attention keeps this order
    block = SMALL if tokens <= FEW or chosen is not None else LARGE
    blocks = triton.cdiv(tokens, block)
    grid: tuple[int, ...] = (blocks, heads, rows)
    if chosen is not None:
        grid = (max(min(AT_ONCE * processors(qkv.device), blocks * heads), 1),)
    count, paged = (rows if chosen is None else len(chosen.slot)), (qkv, qkv, qkv, qkv, 0)
    if pages is not None:
        assert isinstance(start, Tensor), "only the device knows how full pages are"
        paged = pages.table, pages.free, pages.before, pages.after, pages.table.stride(0)
    turn = STILL if positions is None else PAIRS if attn.pairs else HALVES
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
        WIDTH=width,
        COSINE=attn.log_scale is not None,
        TURN=turn,
        STARTS=isinstance(start, Tensor),
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
    qkv_at,
    q_at,
    k_at,
    v_at,
    log_scale_at,
    position_at,
    WIDTH: tl.constexpr,
    COSINE: tl.constexpr,
    TURN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Tokens that lie at `token` [TOKENS, 1] of all: their keys and values go `to` places of the cache, `position` says
    where the cosines and sines of their places are."""
    channel = tl.arange(0, WIDTH)[None, :]
    # [.., 3, H, D]: a token has all its queries, then its keys, then its values.
    at = qkv_at + (token * 3 * heads + head) * WIDTH + channel
    value = tl.load(at + 2 * heads * WIDTH, mask=real, other=0.0)
    # TURN is 0, 1 or 2: as they are, adjacent pairs turned, or halves.
    if TURN > 0:
        both = tl.load(position_at + position + tl.arange(0, TURN * WIDTH)[None, :], mask=real, other=0.0)
        cos, sin = tl.split(tl.reshape(both, (TOKENS, TURN * WIDTH // 2, 2)))
    for part in tl.static_range(2):
        x = tl.load(at + part * heads * WIDTH, mask=real, other=0.0).to(tl.float32)
        if COSINE:
            by = 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1))[:, None], 1e-12)
            if part == 0:
                by *= tl.exp(tl.minimum(tl.load(log_scale_at + head), 4.605170185988092))
            x *= by
        if TURN == 1:
            even, odd = tl.split(tl.reshape(x, (TOKENS, WIDTH // 2, 2)))
            x = tl.interleave(cos * even - sin * odd, sin * even + cos * odd)
        if TURN == 2:
            first, second = tl.split(tl.permute(tl.reshape(x, (TOKENS, 2, WIDTH // 2)), (0, 2, 1)))
            across = tl.permute(tl.join(-second, first), (0, 2, 1))
            x = x * cos + tl.reshape(across, (TOKENS, WIDTH)) * sin
        if part == 0:
            tl.store(q_at + (token * heads + head) * WIDTH + channel, x.to(q_at.dtype.element_ty), mask=real)
        else:
            tl.store(k_at + to + channel, x.to(k_at.dtype.element_ty), mask=real)
    tl.store(v_at + to + channel, value, mask=real)


@triton.jit(do_not_specialize=["table_row", "rows", "tokens", "start"])
def _complete(
    qkv_at,
    q_at,
    k_at,
    v_at,
    log_scale_at,
    position_at,
    start_at,
    table_at,
    free_at,
    before_at,
    after_at,
    table_row,
    rows,
    tokens,
    heads,
    start,
    position_row,
    cache_row,
    cache_head,
    cache_token,
    WIDTH: tl.constexpr,
    COSINE: tl.constexpr,
    TURN: tl.constexpr,
    STARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rank = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    if STARTS:
        start = tl.load(start_at + row)
    position = row * position_row + rank * (TURN * WIDTH)
    token, real = row * tokens + rank, rank < tokens
    if PAGED:
        every = tl.arange(0, ROWS)
        held, need = pages_of_rows(start_at, tl.where(every < rows, tokens, 0), rows, ROWS, PAGE)
        first = tl.load(before_at) + tl.sum(tl.where(every < row, need, 0), 0)
        has, its_table = tl.cdiv(start, PAGE), table_at + row * table_row
        to = place_in_pages(start + rank, real, has, first, its_table, free_at, WIDTH, PAGE) + head * cache_head
        if tl.program_id(0) + head == 0:
            hand_out(row, rows, held, need, table_at, table_row, free_at, before_at, after_at, ROWS, PAGES)
    else:
        to = (start + rank) * cache_token + row * cache_row + head * cache_head
    _split(
        token,
        real,
        head,
        heads,
        to,
        position,
        qkv_at,
        q_at,
        k_at,
        v_at,
        log_scale_at,
        position_at,
        WIDTH,
        COSINE,
        TURN,
        TOKENS,
    )


@triton.jit(do_not_specialize=["table_row", "rows", "cells", "start"])
def _packed(
    qkv_at,
    q_at,
    k_at,
    v_at,
    log_scale_at,
    position_at,
    start_at,
    cell_at,
    first_at,
    table_at,
    free_at,
    before_at,
    after_at,
    table_row,
    rows,
    cells,
    heads,
    start,
    position_row,
    cache_row,
    cache_head,
    cache_token,
    WIDTH: tl.constexpr,
    COSINE: tl.constexpr,
    TURN: tl.constexpr,
    STARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    total = tl.load(first_at + rows)
    every = tl.arange(0, ROWS)
    if PAGED:
        held, need = pages_of_rows(start_at, tokens_of(every, first_at, rows), rows, ROWS, PAGE)
        before = tl.load(before_at)
        for other in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
            hand_out(other, rows, held, need, table_at, table_row, free_at, before_at, after_at, ROWS, PAGES)
    for unit in tl.range(tl.program_id(0), tl.cdiv(total, TOKENS) * heads, tl.num_programs(0)):
        head = unit % heads  # neighbors read the same tokens
        token = unit // heads * TOKENS + tl.arange(0, TOKENS)[:, None]
        real = token < total
        cell = tl.load(cell_at + token, mask=real, other=0)
        its = cell // cells
        row = its.to(tl.int64)
        begin = tl.load(first_at + row, mask=real, other=0)
        length = start
        if STARTS:
            length = tl.load(start_at + row, mask=real, other=0).to(tl.int32)
        rank = token - begin + length
        if PAGED:
            first = before + tl.sum(tl.where(every[None, :] < its, need[None, :], 0), 1)[:, None]
            has, its_table = tl.cdiv(length, PAGE), table_at + row * table_row
            to = place_in_pages(rank, real, has, first, its_table, free_at, WIDTH, PAGE) + head * cache_head
        else:
            to = rank * cache_token + row * cache_row + head * cache_head
        position = row * position_row + (cell - its * cells) * (TURN * WIDTH)
        _split(
            token.to(tl.int64),
            real,
            head,
            heads,
            to,
            position,
            qkv_at,
            q_at,
            k_at,
            v_at,
            log_scale_at,
            position_at,
            WIDTH,
            COSINE,
            TURN,
            TOKENS,
        )
