"""What the kernels of attention share: the walk over keys, its end, and where tokens that lie packed belong."""

from __future__ import annotations

import triton
import triton.language as tl

from nextscale.kernels.triton.fp8 import as_read, by_eights
from nextscale.kernels.triton.paged_kv import page

FEW, SOME = 128, 400  # keys that are worth a program while processors are idle, and while each has but one
MOST = 4  # programs that share the keys


def shares_of_keys(programs: int, keys: int, processors: int, few: int = FEW, some: int = SOME) -> int:
    """Into how many the keys are divided, so that there is work for the whole GPU."""
    # A few programs more than run at once would take as long as twice as many.
    if 2 * processors < programs <= 3 * processors and keys >= 4 * some:
        return 2
    shares = 1
    while shares < MOST and 2 * shares * programs <= 2 * processors:
        worth = few if 2 * shares * programs <= processors else some
        if keys < 2 * shares * worth:
            break
        shares *= 2
    return shares


@triton.jit
def shares_on_device(programs, keys, processors, FEW: tl.constexpr, SOME: tl.constexpr):
    """The same where the host does not know how many there are."""
    late = (2 * processors < programs) & (programs <= 3 * processors) & (keys >= 4 * SOME)
    two = (programs <= processors) & (keys >= 2 * tl.where(2 * programs <= processors, FEW, SOME))
    four = two & (2 * programs <= processors) & (keys >= 4 * tl.where(4 * programs <= processors, FEW, SOME))
    return tl.where(four, 4, tl.where(two | late, 2, 1))


@triton.jit
def tokens_of(row, start_at, rows):
    """How many each of these rows has; one that does not exist has none."""
    real = row < rows
    return tl.load(start_at + row + 1, mask=real, other=0) - tl.load(start_at + row, mask=real, other=0)


@triton.jit
def parts_of_rows(start_at, rows, each, ROWS: tl.constexpr):
    """Into how many parts of `each` tokens the rows before fall, [ROWS], and into how many all do."""
    row = tl.arange(0, ROWS)
    parts = tl.cdiv(tokens_of(row, start_at, rows), each)
    before = tl.sum(tl.where(row[None, :] < row[:, None], parts[None, :], 0), 1)
    return before, tl.sum(parts, 0)


@triton.jit
def place_of_part(part, before, start_at, each):
    """The row of a part, its first token and the end of the row's tokens."""
    row = tl.sum((before <= part).to(tl.int32), 0) - 1
    rank = part - tl.max(tl.where(before <= part, before, 0), 0)
    return row, tl.load(start_at + row) + rank * each, tl.load(start_at + row + 1)


@triton.jit
def of_block(begin, at, place, PAGED: tl.constexpr):
    """Where a block of keys lies: `place` is the same in all pages, or a pointer that moves on."""
    return begin + at + place if PAGED else place


@triton.jit
def walk(
    q,
    k_at,
    v_at,
    k_token,
    v_token,
    table_at,
    keys,
    scale,
    top,
    total,
    weighted,
    seen,
    share,
    shares,
    WIDTH: tl.constexpr,
    ENTROPY: tl.constexpr,
    SHARED: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Over the keys of a row and head, or over a share of them. They may lie in pages of BLOCK_K."""
    first = 0
    if SHARED:
        each = tl.cdiv(tl.cdiv(keys, BLOCK_K), shares) * BLOCK_K
        first = share * each
        keys = tl.minimum(keys, first + each)
    channel, other = tl.arange(0, WIDTH), first + tl.arange(0, BLOCK_K)
    at = 0  # of a page
    if PAGED:
        number = first // BLOCK_K
        at = page(table_at, number, first < keys)
        k_place = tl.arange(0, BLOCK_K)[None, :] * WIDTH + channel[:, None]
        v_place = tl.arange(0, BLOCK_K)[:, None] * WIDTH + channel[None, :]
    else:
        k_place = k_at + other[None, :] * k_token + channel[:, None]
        v_place = v_at + other[:, None] * v_token + channel[None, :]
    whole = tl.maximum(keys - first, 0) // BLOCK_K * BLOCK_K
    for _ in tl.range(0, whole, BLOCK_K):
        k = tl.load(of_block(k_at, at, k_place, PAGED))
        s = tl.dot(q, k)
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        below = s * scale - higher[:, None]
        p = tl.exp2(below)
        fade = tl.exp2(top - higher)
        if ENTROPY:
            weighted = (weighted + total * (top - higher)) * fade + tl.sum(p * below, 1)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(of_block(v_at, at, v_place, PAGED))
        seen = tl.dot(p.to(v.dtype), v, seen * fade[:, None])
        top = higher
        if PAGED:  # a round early: else a fetch of keys would wait for it, and come too late
            number += 1
            at = page(table_at, number, number * BLOCK_K < keys)
        else:
            k_place += BLOCK_K * k_token
            v_place += BLOCK_K * v_token
    if first + whole < keys:
        visible = whole + other < keys
        k = tl.load(of_block(k_at, at, k_place, PAGED), mask=visible[None, :], other=0.0)
        # Early: both are waited for at once.
        v = tl.load(of_block(v_at, at, v_place, PAGED), mask=visible[:, None], other=0.0)
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


@triton.jit
def look(
    q,
    k_at,
    v_at,
    k_token,
    v_token,
    table_at,
    keys,
    tail_k_at,
    tail_v_at,
    tail_token,
    more,
    scale,
    share,
    shares,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    ENTROPY: tl.constexpr,
    SHARED: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What queries see of the keys of a row and head and of those in its tail, or of a share of both."""
    top = tl.full((BLOCK_Q,), -1e30, tl.float32)  # below every score, and times 0 it is 0
    total = tl.zeros((BLOCK_Q,), tl.float32)
    weighted = tl.zeros((BLOCK_Q,), tl.float32)
    seen = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    top, total, weighted, seen = walk(
        q,
        k_at,
        v_at,
        k_token,
        v_token,
        table_at,
        keys,
        scale,
        top,
        total,
        weighted,
        seen,
        share,
        shares,
        WIDTH,
        ENTROPY,
        SHARED,
        PAGED,
        BLOCK_K,
    )
    if TAIL:
        top, total, weighted, seen = walk(
            q,
            tail_k_at,
            tail_v_at,
            tail_token,
            tail_token,
            table_at,
            more,
            scale,
            top,
            total,
            weighted,
            seen,
            share,
            shares,
            WIDTH,
            ENTROPY,
            SHARED,
            False,
            BLOCK_K,
        )
    return top, total, weighted, seen


@triton.jit
def finish(
    seen, total, weighted, out_at, at, spread_at, spread_to, by, real, WIDTH: tl.constexpr, ENTROPY: tl.constexpr
):
    """What queries have seen goes to `at` of the output, in heads, and the entropy of their weights to `spread_to`."""
    place = out_at + at[:, None] * WIDTH + by_eights(WIDTH)
    tl.store(place, as_read(seen / total[:, None], by, out_at.dtype.element_ty), mask=real[:, None])
    if ENTROPY:
        nats = (tl.log2(total) - weighted / total) * 0.6931471805599453
        tl.store(spread_at + spread_to, nats, mask=real)


@triton.jit
def join(
    top,
    total,
    weighted,
    seen,
    seen_at,
    numbers_at,
    at,
    real,
    WIDTH: tl.constexpr,
    ENTROPY: tl.constexpr,
    CACHE: tl.constexpr,
):
    """What queries have seen with what another share of the keys showed them, which lies `at` [BLOCK_Q]."""
    its_top = tl.load(numbers_at + at * 4, mask=real, other=0.0, cache_modifier=CACHE)
    its_total = tl.load(numbers_at + at * 4 + 1, mask=real, other=0.0, cache_modifier=CACHE)
    higher = tl.maximum(top, its_top)
    fade, its_fade = tl.exp2(top - higher), tl.exp2(its_top - higher)
    if ENTROPY:
        its_weighted = tl.load(numbers_at + at * 4 + 2, mask=real, other=0.0, cache_modifier=CACHE)
        weighted = (weighted + total * (top - higher)) * fade
        weighted += (its_weighted + its_total * (its_top - higher)) * its_fade
    total = total * fade + its_total * its_fade
    place = seen_at + at[:, None] * WIDTH + tl.arange(0, WIDTH)
    its_seen = tl.load(place, mask=real[:, None], other=0.0, cache_modifier=CACHE)
    return higher, total, weighted, seen * fade[:, None] + its_seen * its_fade[:, None]


@triton.jit
def leave(top, total, weighted, seen, seen_at, numbers_at, at, real, WIDTH: tl.constexpr):
    """What a share of the keys showed, for `join`."""
    tl.store(seen_at + at[:, None] * WIDTH + tl.arange(0, WIDTH), seen, mask=real[:, None])
    tl.store(numbers_at + at * 4, top, mask=real)
    tl.store(numbers_at + at * 4 + 1, total, mask=real)
    tl.store(numbers_at + at * 4 + 2, weighted, mask=real)
