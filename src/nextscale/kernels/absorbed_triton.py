"""Keys and values that know the linear layers around attention, and the weights of queries over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK_OUT, BLOCK_ROWS = 128, 64


def fused_fold(
    q: nn.Linear, proj: nn.Linear, k: Tensor, v: Tensor, factor: float, length: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, slots, _ = k.shape
    bias = torch.empty(rows, heads * slots, dtype=torch.float32, device=k.device)
    keys = _folded(k, q.weight, q.weight.stride(), q.bias, factor, length, bias)
    values = _folded(v, proj.weight, proj.weight.stride()[::-1], proj.bias, 1 / heads, length, None)
    return keys, bias, values


def _folded(
    text: Tensor,
    weight: Tensor,
    strides: tuple[int, ...],
    layer_bias: Tensor,
    factor: float,
    length: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    rows, heads, slots, width = text.shape
    out = torch.empty(rows, heads * slots, weight.numel() // (heads * width), dtype=text.dtype, device=text.device)
    _fold[(triton.cdiv(out.shape[2], BLOCK_OUT), heads, rows)](
        text,
        weight,
        layer_bias,
        out,
        text if bias is None else bias,
        text if length is None else length,
        *text.stride()[:3],
        *strides,
        heads,
        slots,
        out.shape[2],
        factor,
        KEYS=bias is not None,
        HAS_LENGTH=length is not None,
        WIDTH=width,
        SLOTS=triton.next_power_of_2(slots),
        BLOCK_OUT=BLOCK_OUT,
        num_warps=4,
    )
    return out


@triton.jit
def _fold(
    text_at,
    weight_at,
    layer_bias_at,
    out_at,
    bias_at,
    length_at,
    text_row,
    text_head,
    text_token,
    weight_in,
    weight_out,
    heads,
    slots,
    channels,
    factor,
    KEYS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    slot, inner = tl.arange(0, SLOTS), tl.arange(0, WIDTH)
    seen = slots
    if HAS_LENGTH:
        seen = tl.minimum(slots, tl.load(length_at + row).to(tl.int32))
    place = text_at + row * text_row + head * text_head + slot[:, None] * text_token + inner[None, :]
    text = tl.load(place, mask=(slot < seen)[:, None], other=0.0)
    channel = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = channel < channels
    source = weight_at + (head * WIDTH + inner)[:, None] * weight_in + channel[None, :] * weight_out
    result = tl.dot(text, tl.load(source, mask=real[None, :], other=0.0))
    if KEYS:
        result *= factor
        if tl.program_id(0) == 0:
            layer_bias = tl.load(layer_bias_at + head * WIDTH + inner).to(tl.float32)
            added = tl.sum(text.to(tl.float32) * layer_bias[None, :], 1) * factor
            added = tl.where(slot < seen, added, float("-inf"))
            tl.store(bias_at + (row * heads + head) * slots + slot, added, mask=slot < slots)
    else:
        # The weights of a head add up to 1: each of its values carries a head's share of the last bias.
        result += tl.load(layer_bias_at + channel, mask=real, other=0.0).to(tl.float32)[None, :] * factor
    to = out_at + ((row * heads + head) * slots + slot[:, None]) * channels + channel[None, :]
    tl.store(to, result.to(out_at.dtype.element_ty), mask=(slot < slots)[:, None] & real[None, :])


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
def _softmax(
    scores_at, bias_at, weights_at, lines, queries, heads, slots, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
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
