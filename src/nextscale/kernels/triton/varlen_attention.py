"""Attention of queries that lie packed, the tokens of a row behind those of the row before.

How many there are only the device knows. So the programs are always as many as run at once, and each asks there what it
has to do: some queries of a row, for one head, and a share of the keys. Who shows the last share to some queries puts
all shares together, in their order.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.num_sms import processors
from nextscale.kernels.triton.flash_tiles import (
    FEW,
    MOST,
    SOME,
    finish,
    join,
    leave,
    look,
    parts_of_rows,
    place_of_part,
    shares_on_device,
    tokens_of,
)

if TYPE_CHECKING:
    from nextscale.cache.paged import LayerPages
    from nextscale.methods.selection import Packed

# Keys are shared when there are at most so many blocks of queries for every processor, as `shares_on_device` has it.
SHARED = 3
PARTS = 2 * SHARED  # and so many shares of them
BLOCKS = {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}


@functools.cache
def tickets(device: torch.device) -> Tensor:
    """Zeros, which calls leave as zeros: they are used again and again, but not by two calls at once. A captured call
    has to find them, so they are made before anything is captured."""
    return torch.zeros(SHARED * processors(device), dtype=torch.int32, device=device)


def over_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None,
    entropy: bool,
    tail: tuple[Tensor, Tensor] | None,
    out: Tensor,
    by: float,
    chosen: Packed,
    grown: bool,
    pages: LayerPages | None = None,
    **tuned: int,
) -> tuple[Tensor, Tensor | None]:
    """What the `chosen` queries q [1, H, T, D] see of the first `length` [R] keys and values [R, H, S, D] and, if they
    have `grown`, of as many more as there are queries of their row. See `attend`; `out` is [1, T, H, D]."""
    heads, keys, width = k.shape[1:]
    rows, queries, count = len(chosen.start) - 1, q.shape[2], processors(q.device)
    tuned = {"FEW": FEW, "SOME": SOME, **BLOCKS, **tuned}
    if pages is not None:
        tuned["BLOCK_K"] = pages.size
    block = tuned["BLOCK_Q"]
    # Larger heads leave room for two programs of a processor.
    programs = min((2 if width > 64 else 3) * count, (triton.cdiv(queries, block) + rows) * heads * MOST)
    spread = torch.empty(heads, queries, dtype=torch.float32, device=q.device) if entropy else None
    seen = torch.empty(PARTS * count, block, width, dtype=torch.float32, device=q.device)
    numbers = torch.empty(PARTS * count, block, 4, dtype=torch.float32, device=q.device)
    _packed_attention[(programs,)](
        q,
        k,
        v,
        out,
        spread if spread is not None else q,
        chosen.start,
        length if length is not None else q,
        q if pages is None else pages.table,
        *(tail or (k, v)),
        seen,
        numbers,
        tickets(q.device),
        *q.stride()[1:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *(k if tail is None else tail[0]).stride()[:3],
        rows,
        heads,
        queries,
        keys,
        count,
        0 if pages is None else pages.table.stride(0),
        scale / math.log(2),
        by,
        WIDTH=width,
        HAS_LENGTH=length is not None,
        GROWN=grown,
        TAIL=tail is not None,
        PAGED=pages is not None,
        ENTROPY=entropy,
        ROWS=triton.next_power_of_2(rows),
        **tuned,
    )
    return out.transpose(1, 2), None if spread is None else spread.mean(0, keepdim=True)


@triton.jit(do_not_specialize=["rows", "queries", "keys", "processors", "table_row"])
def _packed_attention(
    q_at,
    k_at,
    v_at,
    out_at,
    spread_at,
    start_at,
    length_at,
    table_at,
    tail_k_at,
    tail_v_at,
    seen_at,
    numbers_at,
    tickets_at,
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
    rows,
    heads,
    queries,
    keys,
    processors,
    table_row,
    scale,
    by,
    WIDTH: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    GROWN: tl.constexpr,
    TAIL: tl.constexpr,
    PAGED: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    before, groups = parts_of_rows(start_at, rows, BLOCK_Q, ROWS)
    items = groups * heads
    every = tl.arange(0, ROWS)
    count = tokens_of(every, start_at, rows)
    visible = tl.full((ROWS,), 0, tl.int32) + keys
    if HAS_LENGTH:
        visible = tl.load(length_at + every, mask=every < rows, other=0).to(tl.int32)
    if GROWN:
        visible += count
    shares = shares_on_device(items, tl.max(tl.where(count > 0, visible, 0), 0), processors, FEW, SOME)
    for unit in tl.range(tl.program_id(0), items * shares, tl.num_programs(0)):
        # Neighbors read the same keys.
        share, item = unit // items, unit % items
        head = item // groups
        its, first, end = place_of_part(item % groups, before, start_at, BLOCK_Q)
        row = its.to(tl.int64)
        here = keys
        if HAS_LENGTH:
            here = tl.load(length_at + row).to(tl.int32)
        more = 0
        if GROWN:
            more = end - tl.load(start_at + row)
        if not TAIL:
            here += more
        rank = tl.arange(0, BLOCK_Q)
        real = first + rank < end
        mine = (first + rank).to(tl.int64)
        place = q_at + head * q_head + mine[:, None] * q_token + tl.arange(0, WIDTH)
        q = tl.load(place, mask=real[:, None], other=0.0)
        top, total, weighted, seen = look(
            q,
            k_at + row * k_row + head * k_head,
            v_at + row * v_row + head * v_head,
            k_token,
            v_token,
            table_at + row * table_row,
            here,
            tail_k_at + row * tail_row + head * tail_head,
            tail_v_at + row * tail_row + head * tail_head,
            tail_token,
            more,
            scale,
            share,
            shares,
            WIDTH,
            TAIL,
            ENTROPY,
            True,
            PAGED,
            BLOCK_Q,
            BLOCK_K,
        )
        at, to = mine * heads + head, head.to(tl.int64) * queries + mine
        if shares == 1:
            finish(seen, total, weighted, out_at, at, spread_at, to, by, real, WIDTH, ENTROPY)
        else:
            part = unit * BLOCK_Q + rank
            leave(top, total, weighted, seen, seen_at, numbers_at, part, real, WIDTH)
            tl.debug_barrier()  # a ticket is for what all threads have left
            ticket = tl.atomic_add(tickets_at + item, 1, sem="acq_rel", scope="gpu")
            if ticket == shares - 1:
                tl.store(tickets_at + item, 0)
                top = tl.full((BLOCK_Q,), -1e30, tl.float32)
                total = tl.zeros((BLOCK_Q,), tl.float32)
                weighted = tl.zeros((BLOCK_Q,), tl.float32)
                seen = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
                for other in tl.range(shares):
                    part = (other * items + item) * BLOCK_Q + rank
                    # Others have written it just now: what a processor remembers of that place is old.
                    top, total, weighted, seen = join(
                        top, total, weighted, seen, seen_at, numbers_at, part, real, WIDTH, ENTROPY, ".cg"
                    )
                finish(seen, total, weighted, out_at, at, spread_at, to, by, real, WIDTH, ENTROPY)
