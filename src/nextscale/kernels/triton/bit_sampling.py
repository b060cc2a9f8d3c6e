"""A program takes some bits, or one token."""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton

BLOCK = 512


def fused_combine(rows: Tensor, images: int, weight: float | Tensor, scale: float | Tensor) -> Tensor:
    """weight * conditional + (1 - weight) * unconditional rows, each multiplied by `scale` before, [B, N, d, 2].

    Numbers may be on the device, in float64. A weight there may be 1, which leaves the conditional rows alone, and
    every image may have its own.
    """
    rows = rows.contiguous()
    out = torch.empty_like(rows[:images])
    count = out.numel()
    # Products and sums are rounded one by one, as torch does.
    weight_on_device, scale_on_device = isinstance(weight, Tensor), isinstance(scale, Tensor)
    own = isinstance(weight, Tensor) and weight.ndim
    _combine[(triton.cdiv(count, BLOCK),)](
        rows,
        out,
        count,
        count // images if own else count,
        weight,
        0.0 if weight_on_device else 1 - weight,
        scale,
        WEIGHT_ON_DEVICE=weight_on_device,
        SCALE_ON_DEVICE=scale_on_device,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def fused_draw(logits: Tensor, noise: Tensor, top_p: float | Tensor, top_k: float | Tensor = 0) -> Tensor:
    """A bit of every pair of logits [B, N, d, 2], from exponential noise of the same shape; whole numbers [B, N, d].

    Both numbers may be on the device, in float64.
    """
    logits, noise = logits.contiguous(), noise.contiguous()
    bits = torch.empty(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    count = bits.numel()
    on_device = isinstance(top_p, Tensor)
    threshold = top_p if on_device else 1.0 if top_k == 1 else 1.0 - top_p if top_p else -1.0
    top_k = top_k if on_device else 0.0
    _draw[(triton.cdiv(count, BLOCK),)](
        logits, noise, bits, count, threshold, top_k, ON_DEVICE=on_device, BLOCK=BLOCK, num_warps=4
    )
    return bits


def fused_entropy(logits: Tensor, unit: str) -> Tensor:
    """[B, N] of logits [B, N, d, 2]."""
    logits = logits.contiguous()
    entropy = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    bits = logits.shape[2]
    scale = 1 / bits if unit == "bit" else 1.0
    _entropy[(entropy.numel(),)](logits, entropy, bits, scale, BLOCK=triton.next_power_of_2(bits), num_warps=1)
    return entropy


@triton.jit(do_not_specialize=["count", "image_numbers", "weight", "rest", "scale"])
def _combine(
    rows_ptr,
    out_ptr,
    count,
    image_numbers,
    weight,
    rest,
    scale,
    WEIGHT_ON_DEVICE: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = offset < count
    conditional = tl.load(rows_ptr + offset, mask=real, other=0.0)
    unconditional = tl.load(rows_ptr + count.to(tl.int64) + offset, mask=real, other=0.0)
    if SCALE_ON_DEVICE:
        factor = tl.load(scale).to(tl.float32)
        conditional, unconditional = conditional * factor, unconditional * factor
    else:
        conditional, unconditional = conditional * scale, unconditional * scale
    if WEIGHT_ON_DEVICE:
        image_weight = tl.load(weight + offset // image_numbers, mask=real, other=1.0)
        interpolate = image_weight.to(tl.float32) * conditional + (1.0 - image_weight).to(tl.float32) * unconditional
        interpolate = tl.where(image_weight == 1.0, conditional, interpolate)
    else:
        interpolate = weight * conditional + rest * unconditional
    tl.store(out_ptr + offset, interpolate, mask=real)


@triton.jit(do_not_specialize=["count", "threshold", "top_k"])
def _draw(logits_ptr, noise_ptr, bits_ptr, count, threshold, top_k, ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = offset < count
    zero = tl.load(logits_ptr + 2 * offset, mask=real, other=0.0)
    one = tl.load(logits_ptr + 2 * offset + 1, mask=real, other=0.0)
    highest = tl.maximum(zero, one)
    zero, one = tl.exp(zero - highest), tl.exp(one - highest)
    total = zero + one
    zero, one = zero / total, one / total
    if ON_DEVICE:  # `threshold` points to top_p
        top_p = tl.load(threshold)
        bound = tl.where(top_p > 0, 1.0 - top_p, -1.0)
        bound = tl.where(tl.load(top_k) == 1, 1.0, bound).to(tl.float32)
    else:
        bound = threshold
    # Only the less likely value can be outside.
    zero, one = (
        tl.where((zero <= bound) & (zero < one), 0.0, zero),
        tl.where((one <= bound) & (one < zero), 0.0, one),
    )
    # Exponential race: the larger p / E is a draw from p.
    zero = zero / tl.load(noise_ptr + 2 * offset, mask=real, other=1.0)
    one = one / tl.load(noise_ptr + 2 * offset + 1, mask=real, other=1.0)
    tl.store(bits_ptr + offset, (one > zero).to(tl.int32), mask=real)


@triton.jit
def _entropy(logits_ptr, entropy_ptr, bits, scale, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    bit = tl.arange(0, BLOCK)
    at = logits_ptr + (token * bits + bit) * 2
    real = bit < bits
    z = tl.load(at + 1, mask=real, other=0.0) - tl.load(at, mask=real, other=0.0)
    softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
    entropy = tl.where(real, softplus - z * tl.sigmoid(z), 0.0)
    tl.store(entropy_ptr + token, tl.sum(entropy, 0) * scale)
