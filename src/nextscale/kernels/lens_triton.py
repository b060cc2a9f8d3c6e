"""A program takes some tokens of an image and walks over their channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nextscale.kernels.lens import BitHead


def fused_lens(x: Tensor, head: BitHead, unit: str) -> Tensor:
    """Entropy [B, N] of the tokens x [B, N, C], a sum over bits or their mean."""
    images, tokens, channels = x.shape
    bits = head.total.shape[1]
    entropy = torch.empty(images, tokens, dtype=torch.float32, device=x.device)
    _lens[(triton.cdiv(tokens, 32), images)](
        x,
        head.factor,
        head.total,
        head.term,
        entropy,
        tokens,
        x.stride(0),
        x.stride(1),
        head.eps,
        1 / bits if unit == "bit" else 1.0,
        CHANNELS=channels,
        BITS=bits,
        BLOCK_BITS=max(triton.next_power_of_2(bits), 16),
        TOKENS=32,
        STEP=64,
        num_warps=4,
        num_stages=3,
    )
    return entropy


@triton.jit
def _lens(
    x_at,
    factor_at,
    total_at,
    term_at,
    entropy_at,
    tokens,
    x_image,
    x_token,
    eps,
    by,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    bit = tl.arange(0, BLOCK_BITS)
    known = bit < BITS
    channel = tl.arange(0, STEP)
    x_place = x_at + image * x_image + token[:, None] * x_token + channel[None, :]
    factor_place = factor_at + image * CHANNELS * BITS + channel[:, None] * BITS + bit[None, :]
    products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
    sums = tl.zeros((TOKENS,), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for _ in tl.range(0, CHANNELS, STEP):
        x = tl.load(x_place, mask=real[:, None], other=0.0)
        factor = tl.load(factor_place, mask=known[None, :], other=0.0)
        # Three products of 10-bit parts have nearly the digits of one in float32.
        products = tl.dot(x, factor, products, input_precision="tf32x3")
        sums += tl.sum(x, 1)
        squares += tl.sum(x * x, 1)
        x_place += STEP
        factor_place += STEP * BITS
    mean = sums / CHANNELS
    deviation = tl.sqrt(tl.maximum(squares / CHANNELS - mean * mean, 0.0) + eps)
    total = tl.load(total_at + image * BITS + bit, mask=known, other=0.0)
    term = tl.load(term_at + image * BITS + bit, mask=known, other=0.0)
    z = (products - mean[:, None] * total[None, :]) / deviation[:, None] + term[None, :]
    # Two outcomes need one number: H = softplus(z) - z sigmoid(z).
    softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
    entropy = tl.where(known[None, :], softplus - z * tl.sigmoid(z), 0.0)
    tl.store(entropy_at + image * tokens + token, tl.sum(entropy, 1) * by, mask=real)
