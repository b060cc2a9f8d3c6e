"""Attention over so few keys that a program holds all of them, as over a text: they are read once for many queries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.num_sms import processors
from nextscale.kernels.triton.flash_tiles import parts_of_rows, place_of_part
from nextscale.kernels.triton.fp8 import as_read, by_eights

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed

FEW_KEYS = 128
AT_ONCE = 3  # programs of a processor


def over_few_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None,
    out: Tensor,
    by: float,
    chosen: Packed | None = None,
) -> Tensor:
    """What queries q [R, H, K, D], or the `chosen` ones [1, H, T, D], see of the first `length` [R] keys and values
    [R, H, S, D], put into `out`; times `by` if that has 8 bits."""
    heads, keys, width = k.shape[1:]
    queries, rows = q.shape[2], len(q) if chosen is None else len(chosen.start) - 1
    block = 64 if queries > 16 else 16
    programs = AT_ONCE * processors(q.device)
    if chosen is None:
        rounds = triton.cdiv(triton.cdiv(queries, block) * rows * heads, programs)  # that many programs run at once
        grid: tuple[int, ...] = (triton.cdiv(queries, block * rounds), rows * heads)
    else:
        # Every row and head may have a program that is not full.
        rounds, grid = programs, (min(programs, triton.cdiv(queries, block) * heads) + rows * heads,)
    _few_keys[grid](
        q,
        k,
        v,
        out,
        length if length is not None else q,
        q if chosen is None else chosen.start,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        rows,
        heads,
        queries,
        keys,
        scale / math.log(2),
        by,
        rounds,
        WIDTH=width,
        HAS_LENGTH=length is not None,
        PACKED=chosen is not None,
        ROWS=1 if chosen is None else triton.next_power_of_2(rows),
        BLOCK_Q=block,
        BLOCK_K=max(triton.next_power_of_2(keys), 16),
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit(do_not_specialize=["rows", "queries", "keys", "rounds"])
def _few_keys(
    q_at,
    k_at,
    v_at,
    out_at,
    length_at,
    start_at,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    rows,
    heads,
    queries,
    keys,
    scale,
    by,
    rounds,
    WIDTH: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Packed queries: `rounds` says how many programs there are; how many blocks each of them takes, their counts."""
    if PACKED:
        _, groups = parts_of_rows(start_at, rows, BLOCK_Q, ROWS)
        each = tl.cdiv(groups * heads, rounds) * BLOCK_Q
        before, parts = parts_of_rows(start_at, rows, tl.maximum(each, 1), ROWS)
        if tl.program_id(0) >= parts * heads:
            return
        head = tl.program_id(0) // parts
        its, first, end = place_of_part(tl.program_id(0) % parts, before, start_at, each)
        row, query = its.to(tl.int64), tl.zeros((), tl.int64)
    else:
        row = (tl.program_id(1) // heads).to(tl.int64)
        head = tl.program_id(1) % heads
        each = rounds * BLOCK_Q
        first, end = tl.program_id(0) * each, queries
        query = row * queries
        q_at += row * q_row
    if HAS_LENGTH:
        keys = tl.load(length_at + row).to(tl.int32)
    channel, other = tl.arange(0, WIDTH), tl.arange(0, BLOCK_K)
    visible = other < keys
    k_place = k_at + row * k_row + head * k_head + other[None, :] * k_token + channel[:, None]
    v_place = v_at + row * v_row + head * v_head + other[:, None] * v_token + channel[None, :]
    k = tl.load(k_place, mask=visible[None, :], other=0.0)
    v = tl.load(v_place, mask=visible[:, None], other=0.0)
    q_place = q_at + head * q_head
    out_place = out_at + (query * heads + head) * WIDTH + by_eights(WIDTH)
    end = tl.minimum(end, first + each)
    for begin in tl.range(first, end, BLOCK_Q):
        mine = begin + tl.arange(0, BLOCK_Q)
        real = (mine < end)[:, None]
        q = tl.load(q_place + mine[:, None] * q_token + channel[None, :], mask=real, other=0.0)
        s = tl.where(visible[None, :], tl.dot(q, k) * scale, float("-inf"))
        p = tl.exp2(s - tl.max(s, 1)[:, None])
        seen = tl.dot(p.to(v.dtype), v) / tl.sum(p, 1)[:, None]
        tl.store(out_place + mine[:, None] * heads * WIDTH, as_read(seen, by, out_at.dtype.element_ty), mask=real)
