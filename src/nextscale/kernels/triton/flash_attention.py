"""Flash attention that returns the entropy of its weights.

The walk over the keys keeps the largest score m and l = sum exp(s - m) of every query. With one number more,
u = sum exp(s - m) (s - m), the entropy is log l - u / l: exact, without a second pass. Scores are in units of log 2.

Few queries do not fill a GPU: then several programs split the keys, and another kernel merges their results. Few keys
have a kernel of their own (`short_kv_attention.py`), and so have packed queries (`varlen_attention.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.fp8 import InputFormat
from nextscale.kernels.occupancy import num_sms
from nextscale.kernels.triton.flash_tiles import attend, merge, num_kv_splits, store_output, store_split
from nextscale.kernels.triton.short_kv_attention import SHORT_KV, short_kv_attention
from nextscale.kernels.triton.varlen_attention import varlen_attention

if TYPE_CHECKING:
    from nextscale.cache.paged import LayerPageTable
    from nextscale.methods.selection import Packed

MERGED_QUERIES = 4  # of a program that merges splits


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None = None,
    more: Tensor | int | None = None,
    return_entropy: bool = False,
    last_scale_kv: tuple[Tensor, Tensor] | None = None,
    input_format: InputFormat | None = None,
    chosen: Packed | None = None,
    grown: bool = False,
    pages: LayerPageTable | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the kernel for `attend`. With `pages`, keys and values give the shape and the address of the first
    page, and `more` may be a number, the same for all rows."""
    rows, heads, queries, head_dim = q.shape
    keys = k.shape[2] + (0 if last_scale_kv is None else last_scale_kv[0].shape[2])
    input_format = input_format or InputFormat(q.dtype)
    # In the order in which the projection behind reads it.
    out = torch.empty(rows, queries, heads, head_dim, dtype=input_format.dtype, device=q.device)
    if k.shape[2] <= SHORT_KV and more is None and not grown and not return_entropy:
        return short_kv_attention(q, k, v, scale, length, out, input_format.scale, chosen).transpose(1, 2), None
    if chosen is not None:
        return varlen_attention(
            q, k, v, scale, length, return_entropy, last_scale_kv, out, input_format.scale, chosen, grown, pages
        )
    entropy = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device) if return_entropy else None
    config = block_config(queries, keys)
    if pages is not None:
        config["BLOCK_K"] = pages.size
    blocks = triton.cdiv(queries, config["BLOCK_Q"])
    splits = num_kv_splits(blocks * rows * heads, keys, num_sms(q.device))
    result, split_stats = out, out
    if splits > 1:
        result = torch.empty(splits, rows * heads, queries, head_dim, dtype=torch.float32, device=q.device)
        split_stats = torch.empty(splits, rows * heads, queries, 4, dtype=torch.float32, device=q.device)
    _attention[(blocks, rows * heads, splits)](
        q,
        k,
        v,
        result,
        split_stats,
        q if entropy is None else entropy,
        length if length is not None else q,
        more if isinstance(more, Tensor) else q,
        q if pages is None else pages.table,
        *(last_scale_kv or (k, v)),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *(k if last_scale_kv is None else last_scale_kv[0]).stride()[:3],
        heads,
        queries,
        k.shape[2],
        more if isinstance(more, int) else 0,
        0 if pages is None else pages.table.stride(0),
        scale / math.log(2),
        input_format.scale,
        HEAD_DIM=head_dim,
        HAS_LENGTH=length is not None,
        HAS_MORE=isinstance(more, Tensor),
        LAST_SCALE=last_scale_kv is not None,
        PAGED=pages is not None,
        ENTROPY=return_entropy,
        IS_SPLIT=splits > 1,
        **config,
    )
    if splits > 1:
        _merge[(triton.cdiv(queries, MERGED_QUERIES), rows * heads)](
            result,
            split_stats,
            out,
            q if entropy is None else entropy,
            heads,
            queries,
            input_format.scale,
            HEAD_DIM=head_dim,
            ENTROPY=return_entropy,
            SPLITS=splits,
            BLOCK_Q=MERGED_QUERIES,
            num_warps=4,
        )
    return out.transpose(1, 2), None if entropy is None else entropy.mean(1)


def block_config(queries: int, keys: int) -> dict[str, int]:
    """Block sizes by what was fastest on an H200 (benchmarks/attention_entropy.py)."""
    if keys <= SHORT_KV:  # there is nothing to load ahead
        return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1}
    if queries <= 16:
        return {"BLOCK_Q": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    if queries <= 2048:
        return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["queries", "keys", "more", "table_row"])
def _attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    stats_ptr,
    entropy_ptr,
    length_ptr,
    more_ptr,
    table_ptr,
    last_k_ptr,
    last_v_ptr,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    last_row,
    last_head,
    last_token,
    heads,
    queries,
    keys,
    more,
    table_row,
    scale,
    out_scale,
    HEAD_DIM: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_MORE: tl.constexpr,
    LAST_SCALE: tl.constexpr,
    PAGED: tl.constexpr,
    ENTROPY: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    if HAS_LENGTH:
        keys = tl.load(length_ptr + row).to(tl.int32)
    if HAS_MORE:
        more = tl.load(more_ptr + row).to(tl.int32)
    if not LAST_SCALE:
        keys += more
    query = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    channel = tl.arange(0, HEAD_DIM)
    real = query < queries
    q_ptrs = q_ptr + row * q_row + head * q_head + query[:, None] * q_token + channel
    q = tl.load(q_ptrs, mask=real[:, None], other=0.0)
    k_ptr += row * k_row + head * k_head
    v_ptr += row * v_row + head * v_head
    last_k_ptr += row * last_row + head * last_head
    last_v_ptr += row * last_row + head * last_head
    split, splits = tl.program_id(2), tl.num_programs(2)
    row_max, row_sum, weighted, acc = attend(
        q,
        k_ptr,
        v_ptr,
        k_token,
        v_token,
        table_ptr + row * table_row,
        keys,
        last_k_ptr,
        last_v_ptr,
        last_token,
        more,
        scale,
        split,
        splits,
        HEAD_DIM,
        LAST_SCALE,
        ENTROPY,
        IS_SPLIT,
        PAGED,
        BLOCK_Q,
        BLOCK_K,
    )
    if IS_SPLIT:
        at = (split * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * queries + query
        store_split(row_max, row_sum, weighted, acc, out_ptr, stats_ptr, at, real, HEAD_DIM)
    else:
        at = (row * queries + query) * heads + head
        to = (row * heads + head) * queries + query
        store_output(acc, row_sum, weighted, out_ptr, at, entropy_ptr, to, out_scale, real, HEAD_DIM, ENTROPY)


@triton.jit(do_not_specialize=["queries"])
def _merge(
    split_ptr,
    stats_ptr,
    out_ptr,
    entropy_ptr,
    heads,
    queries,
    out_scale,
    HEAD_DIM: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    row, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    query = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = query < queries
    row_max = tl.full((BLOCK_Q,), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), tl.float32)
    weighted = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * queries + query
        row_max, row_sum, weighted, acc = merge(
            row_max, row_sum, weighted, acc, split_ptr, stats_ptr, at, real, HEAD_DIM, ENTROPY, ""
        )
    at = (row * queries + query) * heads + head
    to = (row * heads + head) * queries + query
    store_output(acc, row_sum, weighted, out_ptr, at, entropy_ptr, to, out_scale, real, HEAD_DIM, ENTROPY)
