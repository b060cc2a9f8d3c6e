"""Flash attention that returns the entropy of its weights.

For every query it keeps the largest score m and l = sum exp(s - m) while it walks over the keys. With one number more,
u = sum exp(s - m) (s - m), the entropy is log l - u / l: exact, without a second pass. Scores are in units of log 2.

Few queries do not fill a GPU. Then several programs share the keys, and another kernel puts together what they saw.
Few keys have a kernel of their own (`few_keys_triton.py`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.few_keys_triton import FEW_KEYS, over_few_keys
from nextscale.kernels.fp8 import Reads
from nextscale.kernels.fp8_triton import as_read, by_eights

PROCESSORS = 132  # of a large GPU
FEW, SOME = 128, 400  # keys that are worth a program while processors are idle, and while each has but one
MOST = 4  # programs that share the keys
JOINED = 4  # queries of a program that puts shares together


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None = None,
    more: Tensor | None = None,
    entropy: bool = False,
    tail: tuple[Tensor, Tensor] | None = None,
    reads: Reads | None = None,
    **tuned: int,
) -> tuple[Tensor, Tensor | None]:
    rows, heads, queries, width = q.shape
    keys = k.shape[2] + (0 if tail is None else tail[0].shape[2])
    reads = reads or Reads(q.dtype)
    # As the projection behind reads it.
    out = torch.empty(rows, queries, heads, width, dtype=reads.dtype, device=q.device)
    if k.shape[2] <= FEW_KEYS and more is None and not entropy and not tuned:
        return over_few_keys(q, k, v, scale, length, out, reads.by).transpose(1, 2), None
    spread = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device) if entropy else None
    tuned = tuned or blocks(queries, keys)
    groups = triton.cdiv(queries, tuned["BLOCK_Q"])
    shares = tuned.pop("SHARES", None) or shares_of_keys(groups * rows * heads, keys)
    seen, numbers = out, out
    if shares > 1:
        seen = torch.empty(shares, rows * heads, queries, width, dtype=torch.float32, device=q.device)
        numbers = torch.empty(shares, rows * heads, queries, 4, dtype=torch.float32, device=q.device)
    _attention[(groups, rows * heads, shares)](
        q,
        k,
        v,
        seen,
        numbers,
        spread if entropy else q,
        length if length is not None else q,
        more if more is not None else q,
        *(tail or (k, v)),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *(k if tail is None else tail[0]).stride()[:3],
        heads,
        queries,
        k.shape[2],
        scale / math.log(2),
        reads.by,
        WIDTH=width,
        HAS_LENGTH=length is not None,
        HAS_MORE=more is not None,
        TAIL=tail is not None,
        ENTROPY=entropy,
        SHARED=shares > 1,
        **tuned,
    )
    if shares > 1:
        _join[(triton.cdiv(queries, JOINED), rows * heads)](
            seen,
            numbers,
            out,
            spread if entropy else q,
            heads,
            queries,
            reads.by,
            WIDTH=width,
            ENTROPY=entropy,
            SHARES=shares,
            BLOCK_Q=JOINED,
            num_warps=4,
        )
    return out.transpose(1, 2), None if spread is None else spread.mean(1)


def shares_of_keys(programs: int, keys: int) -> int:
    """Into how many the keys are divided, so that there is work for the whole GPU."""
    # A few programs more than run at once would take as long as twice as many.
    if 2 * PROCESSORS < programs <= 3 * PROCESSORS and keys >= 4 * SOME:
        return 2
    shares = 1
    while shares < MOST and 2 * shares * programs <= 2 * PROCESSORS:
        worth = FEW if 2 * shares * programs <= PROCESSORS else SOME
        if keys < 2 * shares * worth:
            break
        shares *= 2
    return shares


def blocks(queries: int, keys: int) -> dict[str, int]:
    """Block sizes by what was fastest on an H200 (benchmarks/attention_entropy.py)."""
    if keys <= FEW_KEYS:  # there is nothing to load ahead
        return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1}
    if queries <= 16:
        return {"BLOCK_Q": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    if queries <= 2048:
        return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@triton.jit
def _walk(
    q,
    k_at,
    v_at,
    k_token,
    v_token,
    keys,
    scale,
    top,
    total,
    weighted,
    seen,
    WIDTH: tl.constexpr,
    ENTROPY: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Over the keys of a row and head, or over a program's share of them."""
    first = 0
    if SHARED:
        each = tl.cdiv(tl.cdiv(keys, BLOCK_K), tl.num_programs(2)) * BLOCK_K
        first = tl.program_id(2) * each
        keys = tl.minimum(keys, first + each)
    channel, other = tl.arange(0, WIDTH), first + tl.arange(0, BLOCK_K)
    k_place = k_at + other[None, :] * k_token + channel[:, None]
    v_place = v_at + other[:, None] * v_token + channel[None, :]
    whole = tl.maximum(keys - first, 0) // BLOCK_K * BLOCK_K
    for _ in tl.range(0, whole, BLOCK_K):
        k = tl.load(k_place)
        s = tl.dot(q, k)
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        below = s * scale - higher[:, None]
        p = tl.exp2(below)
        fade = tl.exp2(top - higher)
        if ENTROPY:
            weighted = (weighted + total * (top - higher)) * fade + tl.sum(p * below, 1)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(v_place)
        seen = tl.dot(p.to(v.dtype), v, seen * fade[:, None])
        top = higher
        k_place += BLOCK_K * k_token
        v_place += BLOCK_K * v_token
    if first + whole < keys:
        visible = whole + other < keys
        k = tl.load(k_place, mask=visible[None, :], other=0.0)
        v = tl.load(v_place, mask=visible[:, None], other=0.0)  # early: both are waited for at once
        s = tl.where(visible[None, :], tl.dot(q, k) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        below = s - higher[:, None]
        p = tl.exp2(below)
        fade = tl.exp2(top - higher)
        if ENTROPY:
            here = tl.sum(tl.where(visible[None, :], p * below, 0.0), 1)
            weighted = (weighted + total * (top - higher)) * fade + here
        total = total * fade + tl.sum(p, 1)
        seen = tl.dot(p.to(v.dtype), v, seen * fade[:, None])
        top = higher
    return top, total, weighted, seen


@triton.jit(do_not_specialize=["queries", "keys"])
def _attention(
    q_at,
    k_at,
    v_at,
    out_at,
    numbers_at,
    spread_at,
    length_at,
    more_at,
    tail_k_at,
    tail_v_at,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    tail_row,
    tail_head,
    tail_token,
    heads,
    queries,
    keys,
    scale,
    by,
    WIDTH: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_MORE: tl.constexpr,
    TAIL: tl.constexpr,
    ENTROPY: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    if HAS_LENGTH:
        keys = tl.load(length_at + row).to(tl.int32)
    more = 0
    if HAS_MORE:
        more = tl.load(more_at + row).to(tl.int32)
    if not TAIL:
        keys += more
    mine = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    channel = tl.arange(0, WIDTH)
    real = mine < queries
    place = q_at + row * q_row + head * q_head + mine[:, None] * q_token + channel
    q = tl.load(place, mask=real[:, None], other=0.0)
    top = tl.full((BLOCK_Q,), -1e30, tl.float32)  # below every score, and times 0 it is 0
    total = tl.zeros((BLOCK_Q,), tl.float32)
    weighted = tl.zeros((BLOCK_Q,), tl.float32)
    seen = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    k_at += row * k_row + head * k_head
    v_at += row * v_row + head * v_head
    top, total, weighted, seen = _walk(
        q, k_at, v_at, k_token, v_token, keys, scale, top, total, weighted, seen, WIDTH, ENTROPY, SHARED, BLOCK_K
    )
    if TAIL:
        k_at = tail_k_at + row * tail_row + head * tail_head
        v_at = tail_v_at + row * tail_row + head * tail_head
        k_token, v_token, keys = tail_token, tail_token, more
        top, total, weighted, seen = _walk(
            q, k_at, v_at, k_token, v_token, keys, scale, top, total, weighted, seen, WIDTH, ENTROPY, SHARED, BLOCK_K
        )
    if SHARED:
        at = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * queries + mine
        tl.store(out_at + at[:, None] * WIDTH + channel, seen, mask=real[:, None])
        tl.store(numbers_at + at * 4, top, mask=real)
        tl.store(numbers_at + at * 4 + 1, total, mask=real)
        tl.store(numbers_at + at * 4 + 2, weighted, mask=real)
    else:
        seen = seen / total[:, None]
        out_place = out_at + ((row * queries + mine[:, None]) * heads + head) * WIDTH + by_eights(WIDTH)
        tl.store(out_place, as_read(seen, by, out_at.dtype.element_ty), mask=real[:, None])
        if ENTROPY:
            nats = (tl.log2(total) - weighted / total) * 0.6931471805599453
            tl.store(spread_at + (row * heads + head) * queries + mine, nats, mask=real)


@triton.jit(do_not_specialize=["queries"])
def _join(
    seen_at,
    numbers_at,
    out_at,
    spread_at,
    heads,
    queries,
    by,
    WIDTH: tl.constexpr,
    ENTROPY: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    mine = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = mine < queries
    channel = tl.arange(0, WIDTH)
    top = tl.full((BLOCK_Q,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    weighted = tl.zeros((BLOCK_Q,), tl.float32)
    seen = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    for share in tl.static_range(SHARES):
        at = (share * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * queries + mine
        its_top = tl.load(numbers_at + at * 4, mask=real, other=0.0)
        its_total = tl.load(numbers_at + at * 4 + 1, mask=real, other=0.0)
        higher = tl.maximum(top, its_top)
        fade, its_fade = tl.exp2(top - higher), tl.exp2(its_top - higher)
        if ENTROPY:
            its_weighted = tl.load(numbers_at + at * 4 + 2, mask=real, other=0.0)
            weighted = (weighted + total * (top - higher)) * fade
            weighted += (its_weighted + its_total * (its_top - higher)) * its_fade
        total = total * fade + its_total * its_fade
        its_seen = tl.load(seen_at + at[:, None] * WIDTH + channel, mask=real[:, None], other=0.0)
        seen = seen * fade[:, None] + its_seen * its_fade[:, None]
        top = higher
    seen = seen / total[:, None]
    out_place = out_at + ((row * queries + mine[:, None]).to(tl.int64) * heads + head) * WIDTH + by_eights(WIDTH)
    tl.store(out_place, as_read(seen, by, out_at.dtype.element_ty), mask=real[:, None])
    if ENTROPY:
        nats = (tl.log2(total) - weighted / total) * 0.6931471805599453
        tl.store(spread_at + tl.program_id(1).to(tl.int64) * queries + mine, nats, mask=real)
