"""Attention over so few keys that a program holds all of them, as over a text: they are read once for many queries."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.fp8_triton import as_read, by_eights

FEW_KEYS = 128
PROGRAMS = 396  # that run at once on a large GPU


def over_few_keys(
    q: Tensor, k: Tensor, v: Tensor, scale: float, length: Tensor | None, out: Tensor, by: float
) -> Tensor:
    """What queries q [R, H, K, D] see of the first `length` [R] keys and values [R, H, S, D], put into `out`; times
    `by` if that has 8 bits."""
    rows, heads, queries, width = q.shape
    keys = k.shape[2]
    block = 64 if queries > 16 else 16
    rounds = triton.cdiv(triton.cdiv(queries, block) * rows * heads, PROGRAMS)  # that many programs run at once
    _few_keys[(triton.cdiv(queries, block * rounds), rows * heads)](
        q,
        k,
        v,
        out,
        length if length is not None else q,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        heads,
        queries,
        keys,
        scale / math.log(2),
        by,
        rounds,
        WIDTH=width,
        HAS_LENGTH=length is not None,
        BLOCK_Q=block,
        BLOCK_K=max(triton.next_power_of_2(keys), 16),
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit(do_not_specialize=["queries", "keys", "rounds"])
def _few_keys(
    q_at,
    k_at,
    v_at,
    out_at,
    length_at,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    heads,
    queries,
    keys,
    scale,
    by,
    rounds,
    WIDTH: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    if HAS_LENGTH:
        keys = tl.load(length_at + row).to(tl.int32)
    channel, other = tl.arange(0, WIDTH), tl.arange(0, BLOCK_K)
    visible = other < keys
    k_place = k_at + row * k_row + head * k_head + other[None, :] * k_token + channel[:, None]
    v_place = v_at + row * v_row + head * v_head + other[:, None] * v_token + channel[None, :]
    k = tl.load(k_place, mask=visible[None, :], other=0.0)
    v = tl.load(v_place, mask=visible[:, None], other=0.0)
    q_place = q_at + row * q_row + head * q_head
    out_place = out_at + (row * queries * heads + head) * WIDTH + by_eights(WIDTH)
    first = tl.program_id(0) * rounds * BLOCK_Q
    for start in tl.range(first, tl.minimum(first + rounds * BLOCK_Q, queries), BLOCK_Q):
        mine = start + tl.arange(0, BLOCK_Q)
        real = (mine < queries)[:, None]
        q = tl.load(q_place + mine[:, None] * q_token + channel[None, :], mask=real, other=0.0)
        s = tl.where(visible[None, :], tl.dot(q, k) * scale, float("-inf"))
        p = tl.exp2(s - tl.max(s, 1)[:, None])
        seen = tl.dot(p.to(v.dtype), v) / tl.sum(p, 1)[:, None]
        tl.store(out_place + mine[:, None] * heads * WIDTH, as_read(seen, by, out_at.dtype.element_ty), mask=real)
