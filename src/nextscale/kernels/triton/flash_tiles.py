"""Functions that the kernels of attention share: the walk over keys, its end, and the rows of packed tokens."""

from __future__ import annotations

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.triton.fp8 import arange_by_8, cast
from nextscale.kernels.triton.paged_kv import page_offset

# Keys that are worth a program while SMs are idle, and while each has but one.
MIN_KEYS_IDLE, MIN_KEYS_BUSY = 128, 400
MAX_SPLITS = 4


def num_kv_splits(programs: int, keys: int, num_sms: int) -> int:
    """Into how many splits the keys are divided, so that there is work for the whole GPU."""
    # A few programs more than run at once would take as long as twice as many.
    if 2 * num_sms < programs <= 3 * num_sms and keys >= 4 * MIN_KEYS_BUSY:
        return 2
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * programs <= 2 * num_sms:
        min_keys = MIN_KEYS_IDLE if 2 * splits * programs <= num_sms else MIN_KEYS_BUSY
        if keys < 2 * splits * min_keys:
            break
        splits *= 2
    return splits


@triton.jit
def num_kv_splits_on_device(programs, keys, num_sms, IDLE: tl.constexpr, BUSY: tl.constexpr):
    """`num_kv_splits` where the host does not know how many programs and keys there are."""
    late = (2 * num_sms < programs) & (programs <= 3 * num_sms) & (keys >= 4 * BUSY)
    two = (programs <= num_sms) & (keys >= 2 * tl.where(2 * programs <= num_sms, IDLE, BUSY))
    four = two & (2 * programs <= num_sms) & (keys >= 4 * tl.where(4 * programs <= num_sms, IDLE, BUSY))
    return tl.where(four, 4, tl.where(two | late, 2, 1))


@triton.jit
def count_tokens(row, start_ptr, rows):
    """How many tokens each of these rows has; one that does not exist has none."""
    real = row < rows
    return tl.load(start_ptr + row + 1, mask=real, other=0) - tl.load(start_ptr + row, mask=real, other=0)


@triton.jit
def count_blocks(start_ptr, rows, size, ROWS: tl.constexpr):
    """Into how many blocks of `size` tokens the rows before are cut, [ROWS], and into how many all are."""
    row = tl.arange(0, ROWS)
    blocks = tl.cdiv(count_tokens(row, start_ptr, rows), size)
    before = tl.sum(tl.where(row[None, :] < row[:, None], blocks[None, :], 0), 1)
    return before, tl.sum(blocks, 0)


@triton.jit
def locate_block(block, before, start_ptr, size):
    """The row of a block, its first token and the end of the row's tokens."""
    row = tl.sum((before <= block).to(tl.int32), 0) - 1
    rank = block - tl.max(tl.where(before <= block, before, 0), 0)
    return row, tl.load(start_ptr + row) + rank * size, tl.load(start_ptr + row + 1)


@triton.jit
def block_ptrs(begin, at, offsets, PAGED: tl.constexpr):
    """Pointers to a block of keys: `offsets` are the same in all pages, or themselves pointers that move on."""
    return begin + at + offsets if PAGED else offsets


@triton.jit
def walk(
    q,
    k_ptr,
    v_ptr,
    k_token,
    v_token,
    table_ptr,
    keys,
    scale,
    row_max,
    row_sum,
    weighted,
    acc,
    split,
    splits,
    HEAD_DIM: tl.constexpr,
    ENTROPY: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Walk over the keys of a row and head, or over a split of them. They may lie in pages of BLOCK_K."""
    first = 0
    if IS_SPLIT:
        size = tl.cdiv(tl.cdiv(keys, BLOCK_K), splits) * BLOCK_K
        first = split * size
        keys = tl.minimum(keys, first + size)
    channel, other = tl.arange(0, HEAD_DIM), first + tl.arange(0, BLOCK_K)
    at = 0  # of a page
    if PAGED:
        number = first // BLOCK_K
        at = page_offset(table_ptr, number, first < keys)
        k_ptrs = tl.arange(0, BLOCK_K)[None, :] * HEAD_DIM + channel[:, None]
        v_ptrs = tl.arange(0, BLOCK_K)[:, None] * HEAD_DIM + channel[None, :]
    else:
        k_ptrs = k_ptr + other[None, :] * k_token + channel[:, None]
        v_ptrs = v_ptr + other[:, None] * v_token + channel[None, :]
    whole = tl.maximum(keys - first, 0) // BLOCK_K * BLOCK_K
    for _ in tl.range(0, whole, BLOCK_K):
        k = tl.load(block_ptrs(k_ptr, at, k_ptrs, PAGED))
        s = tl.dot(q, k)
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        shifted = s * scale - new_max[:, None]
        p = tl.exp2(shifted)
        alpha = tl.exp2(row_max - new_max)
        if ENTROPY:
            weighted = (weighted + row_sum * (row_max - new_max)) * alpha + tl.sum(p * shifted, 1)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v = tl.load(block_ptrs(v_ptr, at, v_ptrs, PAGED))
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        row_max = new_max
        if PAGED:  # a round early: else a fetch of keys would wait for it, and come too late
            number += 1
            at = page_offset(table_ptr, number, number * BLOCK_K < keys)
        else:
            k_ptrs += BLOCK_K * k_token
            v_ptrs += BLOCK_K * v_token
    if first + whole < keys:
        visible = whole + other < keys
        k = tl.load(block_ptrs(k_ptr, at, k_ptrs, PAGED), mask=visible[None, :], other=0.0)
        # Early: both are waited for at once.
        v = tl.load(block_ptrs(v_ptr, at, v_ptrs, PAGED), mask=visible[:, None], other=0.0)
        s = tl.where(visible[None, :], tl.dot(q, k) * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        shifted = s - new_max[:, None]
        p = tl.exp2(shifted)
        alpha = tl.exp2(row_max - new_max)
        if ENTROPY:
            weighted_here = tl.sum(tl.where(visible[None, :], p * shifted, 0.0), 1)
            weighted = (weighted + row_sum * (row_max - new_max)) * alpha + weighted_here
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        row_max = new_max
    return row_max, row_sum, weighted, acc


@triton.jit
def attend(
    q,
    k_ptr,
    v_ptr,
    k_token,
    v_token,
    table_ptr,
    keys,
    last_k_ptr,
    last_v_ptr,
    last_token,
    more,
    scale,
    split,
    splits,
    HEAD_DIM: tl.constexpr,
    LAST_SCALE: tl.constexpr,
    ENTROPY: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Attend to the keys of a row and head and to those of the last scale, or to a split of both."""
    row_max = tl.full((BLOCK_Q,), -1e30, tl.float32)  # below every score, and times 0 it is 0
    row_sum = tl.zeros((BLOCK_Q,), tl.float32)
    weighted = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
    row_max, row_sum, weighted, acc = walk(
        q,
        k_ptr,
        v_ptr,
        k_token,
        v_token,
        table_ptr,
        keys,
        scale,
        row_max,
        row_sum,
        weighted,
        acc,
        split,
        splits,
        HEAD_DIM,
        ENTROPY,
        IS_SPLIT,
        PAGED,
        BLOCK_K,
    )
    if LAST_SCALE:
        row_max, row_sum, weighted, acc = walk(
            q,
            last_k_ptr,
            last_v_ptr,
            last_token,
            last_token,
            table_ptr,
            more,
            scale,
            row_max,
            row_sum,
            weighted,
            acc,
            split,
            splits,
            HEAD_DIM,
            ENTROPY,
            IS_SPLIT,
            False,
            BLOCK_K,
        )
    return row_max, row_sum, weighted, acc


@triton.jit
def store_output(
    acc,
    row_sum,
    weighted,
    out_ptr,
    at,
    entropy_ptr,
    entropy_at,
    out_scale,
    real,
    HEAD_DIM: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Write the output of queries to `at`, counted in heads, and the entropy of their weights to `entropy_at`."""
    out_ptrs = out_ptr + at[:, None] * HEAD_DIM + arange_by_8(HEAD_DIM)
    tl.store(out_ptrs, cast(acc / row_sum[:, None], out_scale, out_ptr.dtype.element_ty), mask=real[:, None])
    if ENTROPY:
        nats = (tl.log2(row_sum) - weighted / row_sum) * 0.6931471805599453
        tl.store(entropy_ptr + entropy_at, nats, mask=real)


@triton.jit
def merge(
    row_max,
    row_sum,
    weighted,
    acc,
    split_ptr,
    stats_ptr,
    at,
    real,
    HEAD_DIM: tl.constexpr,
    ENTROPY: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Merge with the result of another split of the keys, which lies `at` [BLOCK_Q]."""
    other_max = tl.load(stats_ptr + at * 4, mask=real, other=0.0, cache_modifier=CACHE)
    other_sum = tl.load(stats_ptr + at * 4 + 1, mask=real, other=0.0, cache_modifier=CACHE)
    new_max = tl.maximum(row_max, other_max)
    alpha, other_alpha = tl.exp2(row_max - new_max), tl.exp2(other_max - new_max)
    if ENTROPY:
        other_weighted = tl.load(stats_ptr + at * 4 + 2, mask=real, other=0.0, cache_modifier=CACHE)
        weighted = (weighted + row_sum * (row_max - new_max)) * alpha
        weighted += (other_weighted + other_sum * (other_max - new_max)) * other_alpha
    row_sum = row_sum * alpha + other_sum * other_alpha
    other_ptrs = split_ptr + at[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)
    other_acc = tl.load(other_ptrs, mask=real[:, None], other=0.0, cache_modifier=CACHE)
    return new_max, row_sum, weighted, acc * alpha[:, None] + other_acc * other_alpha[:, None]


@triton.jit
def store_split(row_max, row_sum, weighted, acc, split_ptr, stats_ptr, at, real, HEAD_DIM: tl.constexpr):
    """Write the result of a split of the keys, for `merge`."""
    tl.store(split_ptr + at[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM), acc, mask=real[:, None])
    tl.store(stats_ptr + at * 4, row_max, mask=real)
    tl.store(stats_ptr + at * 4 + 1, row_sum, mask=real)
    tl.store(stats_ptr + at * 4 + 2, weighted, mask=real)
