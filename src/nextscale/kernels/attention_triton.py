"""Flash attention that returns the entropy of its weights.

For every query it keeps the largest score m and l = sum exp(s - m) while it walks over the keys. With one number more,
u = sum exp(s - m) (s - m), the entropy is log l - u / l: exact, without a second pass. Scores are in units of log 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None = None,
    more: Tensor | None = None,
    entropy: bool = False,
    **tuned: int,
) -> tuple[Tensor, Tensor | None]:
    rows, heads, queries, width = q.shape
    out = torch.empty(rows, queries, heads, width, dtype=q.dtype, device=q.device)  # as the projection behind reads it
    spread = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device) if entropy else None
    tuned = tuned or blocks(queries, k.shape[2])
    grid = (triton.cdiv(queries, tuned["BLOCK_Q"]), rows * heads)
    _attention[grid](
        q,
        k,
        v,
        out,
        spread if entropy else q,
        length if length is not None else q,
        more if more is not None else q,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        heads,
        queries,
        k.shape[2],
        scale / math.log(2),
        WIDTH=width,
        HAS_LENGTH=length is not None,
        HAS_MORE=more is not None,
        ENTROPY=entropy,
        **tuned,
    )
    return out.transpose(1, 2), None if spread is None else spread.mean(1)


def blocks(queries: int, keys: int) -> dict[str, int]:
    """Block sizes by what was fastest on an H200 (benchmarks/attention_entropy.py)."""
    if keys <= 128:  # a text: there is nothing to load ahead
        return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1}
    if queries <= 16:
        return {"BLOCK_Q": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    if queries <= 2048:
        return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["queries", "keys"])
def _attention(
    q_at,
    k_at,
    v_at,
    out_at,
    spread_at,
    length_at,
    more_at,
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
    WIDTH: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_MORE: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    if HAS_LENGTH:
        keys = tl.load(length_at + row).to(tl.int32)
    if HAS_MORE:
        keys += tl.load(more_at + row).to(tl.int32)
    mine = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    channel = tl.arange(0, WIDTH)
    real = mine < queries
    place = q_at + row * q_row + head * q_head + mine[:, None] * q_token + channel
    q = tl.load(place, mask=real[:, None], other=0.0)
    other = tl.arange(0, BLOCK_K)
    k_place = k_at + row * k_row + head * k_head + other[None, :] * k_token + channel[:, None]
    v_place = v_at + row * v_row + head * v_head + other[:, None] * v_token + channel[None, :]
    top = tl.full((BLOCK_Q,), -1e30, tl.float32)  # below every score, and times 0 it is 0
    total = tl.zeros((BLOCK_Q,), tl.float32)
    weighted = tl.zeros((BLOCK_Q,), tl.float32)
    seen = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    whole = keys // BLOCK_K * BLOCK_K
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
    if whole < keys:
        visible = whole + other < keys
        k = tl.load(k_place, mask=visible[None, :], other=0.0)
        s = tl.where(visible[None, :], tl.dot(q, k) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        below = s - higher[:, None]
        p = tl.exp2(below)
        fade = tl.exp2(top - higher)
        if ENTROPY:
            here = tl.sum(tl.where(visible[None, :], p * below, 0.0), 1)
            weighted = (weighted + total * (top - higher)) * fade + here
        total = total * fade + tl.sum(p, 1)
        v = tl.load(v_place, mask=visible[:, None], other=0.0)
        seen = tl.dot(p.to(v.dtype), v, seen * fade[:, None])
    seen = seen / total[:, None]
    out_place = out_at + ((row * queries + mine[:, None]) * heads + head) * WIDTH + channel
    tl.store(out_place, seen.to(out_at.dtype.element_ty), mask=real[:, None])
    if ENTROPY:
        nats = (tl.log2(total) - weighted / total) * 0.6931471805599453
        tl.store(spread_at + (row * heads + head) * queries + mine, nats, mask=real)
