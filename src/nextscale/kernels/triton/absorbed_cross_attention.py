"""Keys and values that know the linear layers around attention, and the weights of queries over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK_OUT, BLOCK_ROWS = 64, 64
PROGRAMS = 528  # that share a layer, about: each reads ahead while it multiplies


def fused_fold(
    q: nn.Linear, proj: nn.Linear, k: Tensor, v: Tensor, factor: float, length: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, slots, width = k.shape
    channels = q.in_features
    folded = torch.empty(2, rows, heads * slots, channels, dtype=k.dtype, device=k.device)
    bias = torch.empty(rows, heads * slots, dtype=torch.float32, device=k.device)
    blocks = triton.cdiv(channels, BLOCK_OUT)
    rounds = triton.cdiv(blocks, max(PROGRAMS // (2 * rows * heads), 1))
    _fold[(triton.cdiv(blocks, rounds), heads, 2 * rows)](
        k,
        v,
        q.weight,
        proj.weight,
        q.bias,
        proj.bias,
        folded,
        bias,
        k if length is None else length,
        *k.stride()[:3],
        *v.stride()[:3],
        heads,
        slots,
        channels,
        rounds,
        factor,
        HAS_LENGTH=length is not None,
        WIDTH=width,
        SLOTS=triton.next_power_of_2(slots),
        BLOCK_OUT=BLOCK_OUT,
        num_warps=4,
        num_stages=2,
    )
    return folded[0], bias, folded[1]


@triton.jit(do_not_specialize=["rounds"])
def _fold(
    k_at,
    v_at,
    q_weight_at,
    proj_weight_at,
    q_bias_at,
    proj_bias_at,
    folded_at,
    bias_at,
    length_at,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    heads,
    slots,
    channels,
    rounds,
    factor,
    HAS_LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    rows = tl.num_programs(2) // 2
    row, head = (tl.program_id(2) % rows).to(tl.int64), tl.program_id(1)
    slot, inner = tl.arange(0, SLOTS), tl.arange(0, WIDTH)
    seen = slots
    if HAS_LENGTH:
        seen = tl.minimum(slots, tl.load(length_at + row).to(tl.int32))
    visible = slot < seen
    mine = head * WIDTH + inner  # channels of this head
    to = folded_at + ((tl.program_id(2).to(tl.int64) * heads + head) * slots + slot[:, None]) * channels
    first = tl.program_id(0) * rounds * BLOCK_OUT
    end = tl.minimum(first + rounds * BLOCK_OUT, channels)
    if tl.program_id(2) < rows:
        k_place = k_at + row * k_row + head * k_head + slot[:, None] * k_token + inner[None, :]
        k = tl.load(k_place, mask=visible[:, None], other=0.0)
        if tl.program_id(0) == 0:
            q_bias = tl.load(q_bias_at + mine).to(tl.float32)
            bias = tl.sum(k.to(tl.float32) * q_bias[None, :], 1) * factor
            bias = tl.where(visible, bias, float("-inf"))
            tl.store(bias_at + (row * heads + head) * slots + slot, bias, mask=slot < slots)
        for start in tl.range(first, end, BLOCK_OUT):
            channel = start + tl.arange(0, BLOCK_OUT)
            weight = tl.load(q_weight_at + mine[:, None] * channels + channel[None, :])
            keys = tl.dot(k, weight) * factor
            tl.store(to + channel[None, :], keys.to(folded_at.dtype.element_ty), mask=(slot < slots)[:, None])
    else:
        v_place = v_at + row * v_row + head * v_head + slot[:, None] * v_token + inner[None, :]
        v = tl.load(v_place, mask=visible[:, None], other=0.0)
        for start in tl.range(first, end, BLOCK_OUT):
            channel = start + tl.arange(0, BLOCK_OUT)
            values = tl.dot(v, tl.load(proj_weight_at + mine[:, None] + channel[None, :] * heads * WIDTH))
            # The weights of a head add up to 1: each of its values carries a head's share of the last bias.
            values += tl.load(proj_bias_at + channel).to(tl.float32)[None, :] / heads
            tl.store(to + channel[None, :], values.to(folded_at.dtype.element_ty), mask=(slot < slots)[:, None])


def fused_softmax(scores: Tensor, bias: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    rows, queries, width = scores.shape
    slots = width // heads
    weights = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    _softmax[(triton.cdiv(rows * queries * heads, BLOCK_ROWS),)](
        scores,
        bias,
        weights,
        rows * queries * heads,
        queries,
        heads,
        slots,
        SLOTS=triton.next_power_of_2(slots),
        BLOCK=BLOCK_ROWS,
        num_warps=4,
    )
    return weights


@triton.jit(do_not_specialize=["lines", "queries"])
def _softmax(scores_at, bias_at, weights_at, lines, queries, heads, slots, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    line, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    real = (first + line < lines)[:, None] & (slot < slots)[None, :]
    head = (first + line) // heads // queries * heads + (first + line) % heads  # of all rows
    place = line[:, None] * slots + slot[None, :]
    scores = tl.load(scores_at + first.to(tl.int64) * slots + place, mask=real, other=float("-inf"))
    scores += tl.load(bias_at + head[:, None] * slots + slot[None, :], mask=real, other=0.0)
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    weights = (weights / tl.sum(weights, 1)[:, None]).to(weights_at.dtype.element_ty)
    tl.store(weights_at + first.to(tl.int64) * slots + place, weights, mask=real)
