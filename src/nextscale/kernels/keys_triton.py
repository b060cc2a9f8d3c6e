"""One program takes some tokens of a row and one of its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nextscale.methods.selection import Selection
    from nextscale.models.layers import SelfAttention

FEW, SMALL, LARGE = 256, 8, 16  # up to so many tokens, a program takes this number of them; else that


def split_and_store(
    attn: SelfAttention,
    qkv: Tensor,
    positions: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    chosen: Selection | None = None,
) -> Tensor:
    """qkv [R, K, 3, H, D] -> queries [R, H, K, D]; keys and values go to the cache [R, H, S, D] from `start` on, which
    rows may each have their own of, [R]. The tokens are the `chosen` ones of those that `positions` belong to; padding
    goes nowhere."""
    rows, tokens, _, heads, width = qkv.shape
    q = torch.empty(rows, tokens, heads, width, dtype=qkv.dtype, device=qkv.device)  # attention keeps this order
    block = SMALL if tokens <= FEW else LARGE
    grid = (triton.cdiv(tokens, block), heads, rows)
    _split_and_store[grid](
        qkv,
        q,
        keys,
        values,
        attn.log_scale,
        qkv if positions is None else positions,
        start if isinstance(start, Tensor) else qkv,
        qkv if chosen is None else chosen.count,
        qkv if chosen is None else chosen.index,
        tokens,
        heads,
        0 if isinstance(start, Tensor) else start,
        0 if positions is None or len(positions) == 1 else positions.stride(0),
        *keys.stride()[:3],
        WIDTH=width,
        ROTARY=positions is not None,
        STARTS=isinstance(start, Tensor),
        CHOSEN=chosen is not None,
        TOKENS=block,
        num_warps=4,
    )
    return q.transpose(1, 2)


@triton.jit(do_not_specialize=["tokens", "start"])
def _split_and_store(
    qkv_at,
    q_at,
    k_at,
    v_at,
    log_scale_at,
    position_at,
    start_at,
    count_at,
    index_at,
    tokens,
    heads,
    start,
    position_row,
    cache_row,
    cache_head,
    cache_token,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    STARTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    real = token < tokens
    stored = real
    cell = token
    if CHOSEN:
        stored = token < tl.load(count_at + row)
        cell = tl.load(index_at + row * tokens + token, mask=real, other=0)
    if STARTS:
        start = tl.load(start_at + row)
    channel = tl.arange(0, WIDTH)[None, :]
    if ROTARY:
        turn = tl.load(position_at + row * position_row + cell * WIDTH + channel, mask=real, other=0.0)
        cos, sin = tl.split(tl.reshape(turn, (TOKENS, WIDTH // 2, 2)))
    head = tl.program_id(1)
    # [R, K, 3, H, D]: a token has all its queries, then its keys, then its values.
    at = qkv_at + (((row * tokens + token) * 3) * heads + head) * WIDTH + channel
    value = tl.load(at + 2 * heads * WIDTH, mask=stored, other=0.0)
    factor = tl.exp(tl.minimum(tl.load(log_scale_at + head), 4.605170185988092))
    to = (start + token) * cache_token + row * cache_row + head * cache_head + channel
    for part in tl.static_range(2):
        both = tl.load(at + part * heads * WIDTH, mask=real, other=0.0).to(tl.float32)
        by = 1.0 / tl.maximum(tl.sqrt(tl.sum(both * both, 1))[:, None], 1e-12)
        if part == 0:
            by *= factor
        both *= by
        if ROTARY:
            even, odd = tl.split(tl.reshape(both, (TOKENS, WIDTH // 2, 2)))
            both = tl.interleave(cos * even - sin * odd, sin * even + cos * odd)
        if part == 0:
            out = q_at + ((row * tokens + token) * heads + head) * WIDTH + channel
            tl.store(out, both.to(q_at.dtype.element_ty), mask=real)
        else:
            tl.store(k_at + to, both.to(k_at.dtype.element_ty), mask=stored)
    tl.store(v_at + to, value, mask=stored)
