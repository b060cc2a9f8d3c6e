"""A program takes some bits, or a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


def fused_combine(rows: Tensor, images: int, weight: float | Tensor, by: float | Tensor) -> Tensor:
    """weight * conditional + (1 - weight) * unconditional rows, each multiplied with `by` before, [B, N, d, 2].

    Numbers may lie on the device, in float64. A weight there may be 1, which leaves the conditional rows alone, and
    every image may have its own.
    """
    rows = rows.contiguous()
    out = torch.empty_like(rows[:images])
    count = out.numel()
    # Products and sums are rounded one by one, as torch does.
    weight_told, by_told = isinstance(weight, Tensor), isinstance(by, Tensor)
    own = isinstance(weight, Tensor) and weight.ndim
    _combine[(triton.cdiv(count, BLOCK),)](
        rows,
        out,
        count,
        count // images if own else count,
        weight,
        0.0 if weight_told else 1 - weight,
        by,
        WEIGHT_TOLD=weight_told,
        BY_TOLD=by_told,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def fused_draw(logits: Tensor, noise: Tensor, top_p: float | Tensor, top_k: float | Tensor = 0) -> Tensor:
    """A bit of every pair of logits [B, N, d, 2], from exponential noise of the same shape; whole numbers [B, N, d].

    Both numbers may lie on the device, in float64.
    """
    logits, noise = logits.contiguous(), noise.contiguous()
    bits = torch.empty(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    count = bits.numel()
    told = isinstance(top_p, Tensor)
    outside = top_p if told else 1.0 if top_k == 1 else 1.0 - top_p if top_p else -1.0
    _draw[(triton.cdiv(count, BLOCK),)](
        logits, noise, bits, count, outside, top_k if told else 0.0, TOLD=told, BLOCK=BLOCK, num_warps=4
    )
    return bits


def fused_entropy(logits: Tensor, unit: str) -> Tensor:
    """[B, N] of logits [B, N, d, 2]."""
    logits = logits.contiguous()
    entropy = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    bits = logits.shape[2]
    by = 1 / bits if unit == "bit" else 1.0
    _entropy[(entropy.numel(),)](logits, entropy, bits, by, BLOCK=triton.next_power_of_2(bits), num_warps=1)
    return entropy


@triton.jit(do_not_specialize=["count", "each", "weight", "rest", "by"])
def _combine(
    rows_at,
    out_at,
    count,
    each,
    weight,
    rest,
    by,
    WEIGHT_TOLD: tl.constexpr,
    BY_TOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < count
    conditional = tl.load(rows_at + place, mask=real, other=0.0)
    unconditional = tl.load(rows_at + count.to(tl.int64) + place, mask=real, other=0.0)
    if BY_TOLD:
        factor = tl.load(by).to(tl.float32)
        conditional, unconditional = conditional * factor, unconditional * factor
    else:
        conditional, unconditional = conditional * by, unconditional * by
    if WEIGHT_TOLD:
        share = tl.load(weight + place // each, mask=real, other=1.0)
        mixed = share.to(tl.float32) * conditional + (1.0 - share).to(tl.float32) * unconditional
        mixed = tl.where(share == 1.0, conditional, mixed)
    else:
        mixed = weight * conditional + rest * unconditional
    tl.store(out_at + place, mixed, mask=real)


@triton.jit(do_not_specialize=["count", "outside", "top_k"])
def _draw(logits_at, noise_at, bits_at, count, outside, top_k, TOLD: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < count
    zero = tl.load(logits_at + 2 * place, mask=real, other=0.0)
    one = tl.load(logits_at + 2 * place + 1, mask=real, other=0.0)
    highest = tl.maximum(zero, one)
    zero, one = tl.exp(zero - highest), tl.exp(one - highest)
    total = zero + one
    zero, one = zero / total, one / total
    if TOLD:  # `outside` is where top_p lies
        top_p = tl.load(outside)
        bound = tl.where(top_p > 0, 1.0 - top_p, -1.0)
        bound = tl.where(tl.load(top_k) == 1, 1.0, bound).to(tl.float32)
    else:
        bound = outside
    # Only the less likely value can be outside.
    zero, one = (
        tl.where((zero <= bound) & (zero < one), 0.0, zero),
        tl.where((one <= bound) & (one < zero), 0.0, one),
    )
    # Exponential race: the larger p / E is a draw from p.
    zero = zero / tl.load(noise_at + 2 * place, mask=real, other=1.0)
    one = one / tl.load(noise_at + 2 * place + 1, mask=real, other=1.0)
    tl.store(bits_at + place, (one > zero).to(tl.int32), mask=real)


@triton.jit
def _entropy(logits_at, entropy_at, bits, by, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    bit = tl.arange(0, BLOCK)
    at = logits_at + (token * bits + bit) * 2
    real = bit < bits
    z = tl.load(at + 1, mask=real, other=0.0) - tl.load(at, mask=real, other=0.0)
    softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
    entropy = tl.where(real, softplus - z * tl.sigmoid(z), 0.0)
    tl.store(entropy_at + token, tl.sum(entropy, 0) * by)
