"""Attention over so few keys that a program holds all of them, as over a text: they are read once for many queries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.occupancy import num_sms
from nextscale.kernels.triton.flash_tiles import count_blocks, locate_block
from nextscale.kernels.triton.fp8 import arange_by_8, cast

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed

SHORT_KV = 128  # keys
PROGRAMS_PER_SM = 3


def short_kv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None,
    out: Tensor,
    out_scale: float,
    chosen: Packed | None = None,
) -> Tensor:
    """Attend from queries q [R, H, K, D], or from the `chosen` ones [1, H, T, D], to the first `length` [R] keys and
    values [R, H, S, D]. The result goes to `out`, times `out_scale` if that is FP8."""
    heads, keys, head_dim = k.shape[1:]
    queries, rows = q.shape[2], len(q) if chosen is None else len(chosen.start) - 1
    block = 64 if queries > 16 else 16
    programs = PROGRAMS_PER_SM * num_sms(q.device)
    if chosen is None:
        rounds = triton.cdiv(triton.cdiv(queries, block) * rows * heads, programs)  # that many programs run at once
        grid: tuple[int, ...] = (triton.cdiv(queries, block * rounds), rows * heads)
    else:
        # Every row and head may have a program that is not full.
        rounds, grid = programs, (min(programs, triton.cdiv(queries, block) * heads) + rows * heads,)
    _short_kv[grid](
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
        out_scale,
        rounds,
        HEAD_DIM=head_dim,
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
def _short_kv(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    length_ptr,
    start_ptr,
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
    out_scale,
    rounds,
    HEAD_DIM: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of packed queries, `rounds` is the number of programs; how many blocks each takes follows from their counts."""
    if PACKED:
        _, blocks = count_blocks(start_ptr, rows, BLOCK_Q, ROWS)
        chunk = tl.cdiv(blocks * heads, rounds) * BLOCK_Q
        before, chunks = count_blocks(start_ptr, rows, tl.maximum(chunk, 1), ROWS)
        if tl.program_id(0) >= chunks * heads:
            return
        head = tl.program_id(0) // chunks
        row_index, first, end = locate_block(tl.program_id(0) % chunks, before, start_ptr, chunk)
        row, row_start = row_index.to(tl.int64), tl.zeros((), tl.int64)
    else:
        row = (tl.program_id(1) // heads).to(tl.int64)
        head = tl.program_id(1) % heads
        chunk = rounds * BLOCK_Q
        first, end = tl.program_id(0) * chunk, queries
        row_start = row * queries
        q_ptr += row * q_row
    if HAS_LENGTH:
        keys = tl.load(length_ptr + row).to(tl.int32)
    channel, other = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_K)
    visible = other < keys
    k_ptrs = k_ptr + row * k_row + head * k_head + other[None, :] * k_token + channel[:, None]
    v_ptrs = v_ptr + row * v_row + head * v_head + other[:, None] * v_token + channel[None, :]
    k = tl.load(k_ptrs, mask=visible[None, :], other=0.0)
    v = tl.load(v_ptrs, mask=visible[:, None], other=0.0)
    q_ptrs = q_ptr + head * q_head
    out_ptrs = out_ptr + (row_start * heads + head) * HEAD_DIM + arange_by_8(HEAD_DIM)
    end = tl.minimum(end, first + chunk)
    for begin in tl.range(first, end, BLOCK_Q):
        query = begin + tl.arange(0, BLOCK_Q)
        real = (query < end)[:, None]
        q = tl.load(q_ptrs + query[:, None] * q_token + channel[None, :], mask=real, other=0.0)
        s = tl.where(visible[None, :], tl.dot(q, k) * scale, float("-inf"))
        p = tl.exp2(s - tl.max(s, 1)[:, None])
        output = tl.dot(p.to(v.dtype), v) / tl.sum(p, 1)[:, None]
        tl.store(
            out_ptrs + query[:, None] * heads * HEAD_DIM, cast(output, out_scale, out_ptr.dtype.element_ty), mask=real
        )
