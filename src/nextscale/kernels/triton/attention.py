"""Flash attention that returns the entropy of its weights.

For every query it keeps the largest score m and l = sum exp(s - m) while it walks over the keys. With one number more,
u = sum exp(s - m) (s - m), the entropy is log l - u / l: exact, without a second pass. Scores are in units of log 2.

Few queries do not fill a GPU. Then several programs share the keys, and another kernel puts together what they saw.
Few keys have a kernel of their own (`few_keys_triton.py`), and so have queries that lie packed
(`packed_attention_triton.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.fp8 import Reads
from nextscale.kernels.num_sms import processors
from nextscale.kernels.triton.flash_tiles import finish, join, leave, look, shares_of_keys
from nextscale.kernels.triton.short_kv_attention import FEW_KEYS, over_few_keys
from nextscale.kernels.triton.varlen_attention import over_packed

if TYPE_CHECKING:
    from nextscale.cache.paged import LayerPages
    from nextscale.methods.selection import Packed

JOINED = 4  # queries of a program that puts shares together


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None = None,
    more: Tensor | int | None = None,
    entropy: bool = False,
    tail: tuple[Tensor, Tensor] | None = None,
    reads: Reads | None = None,
    chosen: Packed | None = None,
    grown: bool = False,
    pages: LayerPages | None = None,
    **tuned: int,
) -> tuple[Tensor, Tensor | None]:
    """As `attend` says. With `pages`, keys and values tell shape and place, and `more` may be the same of all rows."""
    rows, heads, queries, width = q.shape
    keys = k.shape[2] + (0 if tail is None else tail[0].shape[2])
    reads = reads or Reads(q.dtype)
    # As the projection behind reads it.
    out = torch.empty(rows, queries, heads, width, dtype=reads.dtype, device=q.device)
    if k.shape[2] <= FEW_KEYS and more is None and not grown and not entropy and not tuned:
        return over_few_keys(q, k, v, scale, length, out, reads.by, chosen).transpose(1, 2), None
    if chosen is not None:
        return over_packed(q, k, v, scale, length, entropy, tail, out, reads.by, chosen, grown, pages, **tuned)
    spread = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device) if entropy else None
    tuned = tuned or blocks(queries, keys)
    if pages is not None:
        tuned |= {"BLOCK_K": pages.size}
    groups = triton.cdiv(queries, tuned["BLOCK_Q"])
    shares = tuned.pop("SHARES", None) or shares_of_keys(groups * rows * heads, keys, processors(q.device))
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
        more if isinstance(more, Tensor) else q,
        q if pages is None else pages.table,
        *(tail or (k, v)),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *(k if tail is None else tail[0]).stride()[:3],
        heads,
        queries,
        k.shape[2],
        more if isinstance(more, int) else 0,
        0 if pages is None else pages.table.stride(0),
        scale / math.log(2),
        reads.by,
        WIDTH=width,
        HAS_LENGTH=length is not None,
        HAS_MORE=isinstance(more, Tensor),
        TAIL=tail is not None,
        PAGED=pages is not None,
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


def blocks(queries: int, keys: int) -> dict[str, int]:
    """Block sizes by what was fastest on an H200 (benchmarks/attention_entropy.py)."""
    if keys <= FEW_KEYS:  # there is nothing to load ahead
        return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1}
    if queries <= 16:
        return {"BLOCK_Q": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    if queries <= 2048:
        return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["queries", "keys", "more", "table_row"])
def _attention(
    q_at,
    k_at,
    v_at,
    out_at,
    numbers_at,
    spread_at,
    length_at,
    more_at,
    table_at,
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
    more,
    table_row,
    scale,
    by,
    WIDTH: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_MORE: tl.constexpr,
    TAIL: tl.constexpr,
    PAGED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    if HAS_LENGTH:
        keys = tl.load(length_at + row).to(tl.int32)
    if HAS_MORE:
        more = tl.load(more_at + row).to(tl.int32)
    if not TAIL:
        keys += more
    mine = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    channel = tl.arange(0, WIDTH)
    real = mine < queries
    place = q_at + row * q_row + head * q_head + mine[:, None] * q_token + channel
    q = tl.load(place, mask=real[:, None], other=0.0)
    k_at += row * k_row + head * k_head
    v_at += row * v_row + head * v_head
    tail_k_at += row * tail_row + head * tail_head
    tail_v_at += row * tail_row + head * tail_head
    share, shares = tl.program_id(2), tl.num_programs(2)
    top, total, weighted, seen = look(
        q,
        k_at,
        v_at,
        k_token,
        v_token,
        table_at + row * table_row,
        keys,
        tail_k_at,
        tail_v_at,
        tail_token,
        more,
        scale,
        share,
        shares,
        WIDTH,
        TAIL,
        ENTROPY,
        SHARED,
        PAGED,
        BLOCK_Q,
        BLOCK_K,
    )
    if SHARED:
        at = (share * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * queries + mine
        leave(top, total, weighted, seen, out_at, numbers_at, at, real, WIDTH)
    else:
        at = (row * queries + mine) * heads + head
        to = (row * heads + head) * queries + mine
        finish(seen, total, weighted, out_at, at, spread_at, to, by, real, WIDTH, ENTROPY)


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
    row, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    mine = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = mine < queries
    top = tl.full((BLOCK_Q,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    weighted = tl.zeros((BLOCK_Q,), tl.float32)
    seen = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    for share in tl.static_range(SHARES):
        at = (share * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * queries + mine
        top, total, weighted, seen = join(top, total, weighted, seen, seen_at, numbers_at, at, real, WIDTH, ENTROPY, "")
    at = (row * queries + mine) * heads + head
    to = (row * heads + head) * queries + mine
    finish(seen, total, weighted, out_at, at, spread_at, to, by, real, WIDTH, ENTROPY)
