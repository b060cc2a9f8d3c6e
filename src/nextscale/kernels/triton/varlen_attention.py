"""Attention of packed queries, the tokens of a row behind those of the row before.

Only the device knows how many there are. So there are always as many programs as run at once, and each reads there what
it has to do: some queries of a row, for one head, and a split of the keys. The program that finishes the last split of
some queries merges all splits, in their order.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.occupancy import num_sms
from nextscale.kernels.triton.flash_tiles import (
    MAX_SPLITS,
    MIN_KEYS_BUSY,
    MIN_KEYS_IDLE,
    attend,
    count_blocks,
    count_tokens,
    locate_block,
    merge,
    num_kv_splits_on_device,
    store_output,
    store_split,
)

if TYPE_CHECKING:
    from nextscale.cache.paged import LayerPageTable
    from nextscale.methods.selection import Packed

SPLIT_BLOCKS_PER_SM = 3  # at most so many blocks of queries have split keys: see `num_kv_splits_on_device`
PARTIALS_PER_SM = 2 * SPLIT_BLOCKS_PER_SM
BLOCKS = {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Zeros, which every call leaves as zeros; two calls at once may not share them. A captured call has to find them,
    so they are made before anything is captured."""
    return torch.zeros(SPLIT_BLOCKS_PER_SM * num_sms(device), dtype=torch.int32, device=device)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None,
    return_entropy: bool,
    last_scale_kv: tuple[Tensor, Tensor] | None,
    out: Tensor,
    out_scale: float,
    chosen: Packed,
    grown: bool,
    pages: LayerPageTable | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend from the `chosen` queries q [1, H, T, D] to the first `length` [R] keys and values [R, H, S, D] and, if
    they have `grown`, to as many more as their row has queries. See `attend`; `out` is [1, T, H, D]."""
    heads, keys, head_dim = k.shape[1:]
    rows, queries, count = len(chosen.start) - 1, q.shape[2], num_sms(q.device)
    config = BLOCKS if pages is None else {**BLOCKS, "BLOCK_K": pages.size}
    block = config["BLOCK_Q"]
    # Larger heads leave room for two programs of an SM.
    programs = min((2 if head_dim > 64 else 3) * count, (triton.cdiv(queries, block) + rows) * heads * MAX_SPLITS)
    entropy = torch.empty(heads, queries, dtype=torch.float32, device=q.device) if return_entropy else None
    split_output = torch.empty(PARTIALS_PER_SM * count, block, head_dim, dtype=torch.float32, device=q.device)
    split_stats = torch.empty(PARTIALS_PER_SM * count, block, 4, dtype=torch.float32, device=q.device)
    _varlen_attention[(programs,)](
        q,
        k,
        v,
        out,
        q if entropy is None else entropy,
        chosen.start,
        length if length is not None else q,
        q if pages is None else pages.table,
        *(last_scale_kv or (k, v)),
        split_output,
        split_stats,
        counters(q.device),
        *q.stride()[1:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *(k if last_scale_kv is None else last_scale_kv[0]).stride()[:3],
        rows,
        heads,
        queries,
        keys,
        count,
        0 if pages is None else pages.table.stride(0),
        scale / math.log(2),
        out_scale,
        HEAD_DIM=head_dim,
        HAS_LENGTH=length is not None,
        GROWN=grown,
        LAST_SCALE=last_scale_kv is not None,
        PAGED=pages is not None,
        ENTROPY=return_entropy,
        ROWS=triton.next_power_of_2(rows),
        IDLE=MIN_KEYS_IDLE,
        BUSY=MIN_KEYS_BUSY,
        **config,
    )
    return out.transpose(1, 2), None if entropy is None else entropy.mean(0, keepdim=True)


@triton.jit(do_not_specialize=["rows", "queries", "keys", "num_sms", "table_row"])
def _varlen_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    entropy_ptr,
    start_ptr,
    length_ptr,
    table_ptr,
    last_k_ptr,
    last_v_ptr,
    split_ptr,
    stats_ptr,
    counters_ptr,
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
    rows,
    heads,
    queries,
    keys,
    num_sms,
    table_row,
    scale,
    out_scale,
    HEAD_DIM: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    GROWN: tl.constexpr,
    LAST_SCALE: tl.constexpr,
    PAGED: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    IDLE: tl.constexpr,
    BUSY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    before, blocks = count_blocks(start_ptr, rows, BLOCK_Q, ROWS)
    items = blocks * heads
    all_rows = tl.arange(0, ROWS)
    count = count_tokens(all_rows, start_ptr, rows)
    visible = tl.full((ROWS,), 0, tl.int32) + keys
    if HAS_LENGTH:
        visible = tl.load(length_ptr + all_rows, mask=all_rows < rows, other=0).to(tl.int32)
    if GROWN:
        visible += count
    splits = num_kv_splits_on_device(items, tl.max(tl.where(count > 0, visible, 0), 0), num_sms, IDLE, BUSY)
    for unit in tl.range(tl.program_id(0), items * splits, tl.num_programs(0)):
        # Neighbors read the same keys.
        split, item = unit // items, unit % items
        head = item // blocks
        row_index, first, end = locate_block(item % blocks, before, start_ptr, BLOCK_Q)
        row = row_index.to(tl.int64)
        visible_keys = keys
        if HAS_LENGTH:
            visible_keys = tl.load(length_ptr + row).to(tl.int32)
        more = 0
        if GROWN:
            more = end - tl.load(start_ptr + row)
        if not LAST_SCALE:
            visible_keys += more
        rank = tl.arange(0, BLOCK_Q)
        real = first + rank < end
        query = (first + rank).to(tl.int64)
        q_ptrs = q_ptr + head * q_head + query[:, None] * q_token + tl.arange(0, HEAD_DIM)
        q = tl.load(q_ptrs, mask=real[:, None], other=0.0)
        row_max, row_sum, weighted, acc = attend(
            q,
            k_ptr + row * k_row + head * k_head,
            v_ptr + row * v_row + head * v_head,
            k_token,
            v_token,
            table_ptr + row * table_row,
            visible_keys,
            last_k_ptr + row * last_row + head * last_head,
            last_v_ptr + row * last_row + head * last_head,
            last_token,
            more,
            scale,
            split,
            splits,
            HEAD_DIM,
            LAST_SCALE,
            ENTROPY,
            True,
            PAGED,
            BLOCK_Q,
            BLOCK_K,
        )
        at, entropy_at = query * heads + head, head.to(tl.int64) * queries + query
        if splits == 1:
            store_output(
                acc, row_sum, weighted, out_ptr, at, entropy_ptr, entropy_at, out_scale, real, HEAD_DIM, ENTROPY
            )
        else:
            slot = unit * BLOCK_Q + rank
            store_split(row_max, row_sum, weighted, acc, split_ptr, stats_ptr, slot, real, HEAD_DIM)
            tl.debug_barrier()  # all threads have written before one says so
            arrived = tl.atomic_add(counters_ptr + item, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                tl.store(counters_ptr + item, 0)
                row_max = tl.full((BLOCK_Q,), -1e30, tl.float32)
                row_sum = tl.zeros((BLOCK_Q,), tl.float32)
                weighted = tl.zeros((BLOCK_Q,), tl.float32)
                acc = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
                for other in tl.range(splits):
                    slot = (other * items + item) * BLOCK_Q + rank
                    # Not from the cache of this SM: other programs have just written it.
                    row_max, row_sum, weighted, acc = merge(
                        row_max, row_sum, weighted, acc, split_ptr, stats_ptr, slot, real, HEAD_DIM, ENTROPY, ".cg"
                    )
                store_output(
                    acc, row_sum, weighted, out_ptr, at, entropy_ptr, entropy_at, out_scale, real, HEAD_DIM, ENTROPY
                )
