"""Keys and values with the linear layers multiplied in, and the weights of queries over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nextscale.kernels.dispatch import tl, triton

BLOCK_OUT, BLOCK_ROWS = 64, 64
PROGRAMS = 528  # that share a layer, about: each reads ahead while it multiplies


def fused_fold(
    q: nn.Linear, proj: nn.Linear, k: Tensor, v: Tensor, scale: float, length: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, num_keys, head_dim = k.shape
    channels = q.in_features
    folded = torch.empty(2, rows, heads * num_keys, channels, dtype=k.dtype, device=k.device)
    bias = torch.empty(rows, heads * num_keys, dtype=torch.float32, device=k.device)
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
        num_keys,
        channels,
        rounds,
        scale,
        HAS_LENGTH=length is not None,
        HEAD_DIM=head_dim,
        KEYS=triton.next_power_of_2(num_keys),
        BLOCK_OUT=BLOCK_OUT,
        num_warps=4,
        num_stages=2,
    )
    return folded[0], bias, folded[1]


@triton.jit(do_not_specialize=["rounds"])
def _fold(
    k_ptr,
    v_ptr,
    q_weight_ptr,
    proj_weight_ptr,
    q_bias_ptr,
    proj_bias_ptr,
    folded_ptr,
    bias_ptr,
    length_ptr,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    heads,
    num_keys,
    channels,
    rounds,
    scale,
    HAS_LENGTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    rows = tl.num_programs(2) // 2
    row, head = (tl.program_id(2) % rows).to(tl.int64), tl.program_id(1)
    key, inner = tl.arange(0, KEYS), tl.arange(0, HEAD_DIM)
    visible_keys = num_keys
    if HAS_LENGTH:
        visible_keys = tl.minimum(num_keys, tl.load(length_ptr + row).to(tl.int32))
    visible = key < visible_keys
    head_channel = head * HEAD_DIM + inner  # channels of this head
    to = folded_ptr + ((tl.program_id(2).to(tl.int64) * heads + head) * num_keys + key[:, None]) * channels
    first = tl.program_id(0) * rounds * BLOCK_OUT
    end = tl.minimum(first + rounds * BLOCK_OUT, channels)
    if tl.program_id(2) < rows:
        k_ptrs = k_ptr + row * k_row + head * k_head + key[:, None] * k_token + inner[None, :]
        k = tl.load(k_ptrs, mask=visible[:, None], other=0.0)
        if tl.program_id(0) == 0:
            q_bias = tl.load(q_bias_ptr + head_channel).to(tl.float32)
            bias = tl.sum(k.to(tl.float32) * q_bias[None, :], 1) * scale
            bias = tl.where(visible, bias, float("-inf"))
            tl.store(bias_ptr + (row * heads + head) * num_keys + key, bias, mask=key < num_keys)
        for start in tl.range(first, end, BLOCK_OUT):
            channel = start + tl.arange(0, BLOCK_OUT)
            weight = tl.load(q_weight_ptr + head_channel[:, None] * channels + channel[None, :])
            keys = tl.dot(k, weight) * scale
            tl.store(to + channel[None, :], keys.to(folded_ptr.dtype.element_ty), mask=(key < num_keys)[:, None])
    else:
        v_ptrs = v_ptr + row * v_row + head * v_head + key[:, None] * v_token + inner[None, :]
        v = tl.load(v_ptrs, mask=visible[:, None], other=0.0)
        for start in tl.range(first, end, BLOCK_OUT):
            channel = start + tl.arange(0, BLOCK_OUT)
            values = tl.dot(v, tl.load(proj_weight_ptr + head_channel[:, None] + channel[None, :] * heads * HEAD_DIM))
            # The weights of a head add up to 1: each of its values carries a head's share of the last bias.
            values += tl.load(proj_bias_ptr + channel).to(tl.float32)[None, :] / heads
            tl.store(to + channel[None, :], values.to(folded_ptr.dtype.element_ty), mask=(key < num_keys)[:, None])


def fused_softmax(scores: Tensor, bias: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    rows, queries, columns = scores.shape
    num_keys = columns // heads
    weights = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    _softmax[(triton.cdiv(rows * queries * heads, BLOCK_ROWS),)](
        scores,
        bias,
        weights,
        rows * queries * heads,
        queries,
        heads,
        num_keys,
        KEYS=triton.next_power_of_2(num_keys),
        BLOCK=BLOCK_ROWS,
        num_warps=4,
    )
    return weights


@triton.jit(do_not_specialize=["lines", "queries"])
def _softmax(
    scores_ptr, bias_ptr, weights_ptr, lines, queries, heads, num_keys, KEYS: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0) * BLOCK
    line, key = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    real = (first + line < lines)[:, None] & (key < num_keys)[None, :]
    head = (first + line) // heads // queries * heads + (first + line) % heads  # of all rows
    offset = line[:, None] * num_keys + key[None, :]
    scores = tl.load(scores_ptr + first.to(tl.int64) * num_keys + offset, mask=real, other=float("-inf"))
    scores += tl.load(bias_ptr + head[:, None] * num_keys + key[None, :], mask=real, other=0.0)
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    weights = (weights / tl.sum(weights, 1)[:, None]).to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + first.to(tl.int64) * num_keys + offset, weights, mask=real)
