"""A program takes some tokens of an image and some of their channels; another kernel puts the parts together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nextscale.kernels.lens import BitHead


TOKENS, STEP = 64, 64  # tokens and channels that a program holds at once
PROGRAMS = 300  # that run at once on a large GPU
FEW = 8  # tokens of a program that puts the parts together


def fused_lens(x: Tensor, head: BitHead, unit: str) -> Tensor:
    """Entropy [B, N] of the tokens x [B, N, C], a sum over bits or their mean."""
    images, tokens, channels = x.shape
    bits = head.total.shape[1]
    groups = triton.cdiv(tokens, TOKENS)
    # Not by the number of images: a batch must give exactly what its images give.
    parts = 1
    while 2 * parts * groups <= PROGRAMS and channels % (2 * parts * STEP) == 0:
        parts *= 2
    block = max(triton.next_power_of_2(bits), 16)
    sums = torch.empty(parts, images, tokens, block + 16, dtype=torch.float32, device=x.device)
    entropy = torch.empty(images, tokens, dtype=torch.float32, device=x.device)
    sizes = {"BITS": bits, "BLOCK_BITS": block}
    _sums[(groups, parts, images)](
        x,
        head.factor,
        sums,
        tokens,
        channels,
        channels // parts,
        *x.stride()[:2],
        **sizes,
        TOKENS=TOKENS,
        STEP=STEP,
        num_warps=4,
        num_stages=3,
    )
    _entropy[(triton.cdiv(tokens, FEW), images)](
        sums,
        head.total,
        head.term,
        entropy,
        tokens,
        images,
        channels,
        head.eps,
        1 / bits if unit == "bit" else 1.0,
        **sizes,
        TOKENS=FEW,
        PARTS=parts,
        num_warps=4,
    )
    return entropy


@triton.jit(do_not_specialize=["tokens"])
def _sums(
    x_at,
    factor_at,
    sums_at,
    tokens,
    channels,
    each,
    x_image,
    x_token,
    BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Of a part of the channels: products with the head's weights, sum, and sum of squares."""
    part, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    bit = tl.arange(0, BLOCK_BITS)
    known = bit < BITS
    channel = part * each + tl.arange(0, STEP)
    x_place = x_at + image * x_image + token[:, None] * x_token + channel[None, :]
    factor_place = factor_at + image * channels * BITS + channel[:, None] * BITS + bit[None, :]
    products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
    sums = tl.zeros((TOKENS, STEP), tl.float32)
    squares = tl.zeros((TOKENS, STEP), tl.float32)
    for _ in tl.range(0, each, STEP):
        x = tl.load(x_place, mask=real[:, None], other=0.0)
        factor = tl.load(factor_place, mask=known[None, :], other=0.0)
        # Three products of 10-bit parts have nearly the digits of one in float32.
        products = tl.dot(x, factor, products, input_precision="tf32x3")
        sums += x
        squares += x * x
        x_place += STEP
        factor_place += STEP * BITS
    to = sums_at + ((part * tl.num_programs(2) + image) * tokens + token) * (BLOCK_BITS + 16)
    tl.store(to[:, None] + bit[None, :], products, mask=real[:, None])
    tl.store(to + BLOCK_BITS, tl.sum(sums, 1), mask=real)
    tl.store(to + BLOCK_BITS + 1, tl.sum(squares, 1), mask=real)


@triton.jit(do_not_specialize=["tokens", "images"])
def _entropy(
    sums_at,
    total_at,
    term_at,
    entropy_at,
    tokens,
    images,
    channels,
    eps,
    by,
    BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    bit = tl.arange(0, BLOCK_BITS)
    known = bit < BITS
    products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
    sums = tl.zeros((TOKENS,), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for part in tl.static_range(PARTS):
        at = sums_at + ((part * images + image) * tokens + token) * (BLOCK_BITS + 16)
        products += tl.load(at[:, None] + bit[None, :], mask=real[:, None], other=0.0)
        sums += tl.load(at + BLOCK_BITS, mask=real, other=0.0)
        squares += tl.load(at + BLOCK_BITS + 1, mask=real, other=0.0)
    mean = sums / channels
    deviation = tl.sqrt(tl.maximum(squares / channels - mean * mean, 0.0) + eps)
    total = tl.load(total_at + image * BITS + bit, mask=known, other=0.0)
    term = tl.load(term_at + image * BITS + bit, mask=known, other=0.0)
    z = (products - mean[:, None] * total[None, :]) / deviation[:, None] + term[None, :]
    # Two outcomes need one number: H = softplus(z) - z sigmoid(z).
    softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
    entropy = tl.where(known[None, :], softplus - z * tl.sigmoid(z), 0.0)
    tl.store(entropy_at + image * tokens + token, tl.sum(entropy, 1) * by, mask=real)
