"""A program takes some tokens of an image and some of their channels; another kernel puts the parts together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nextscale.kernels.logit_lens import BitHead


TOKENS, STEP = 64, 64  # tokens and channels that a program holds at once
PROGRAMS = 300  # that run at once on a large GPU
MOST = 8  # parts
FEW = 8  # tokens of a program that puts the parts together


def fused_head(weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor, total and term of a `BitHead`."""
    images, channels = scale.shape
    bits = len(weight) // 2
    factor = torch.empty(images, channels, bits, dtype=torch.float32, device=scale.device)
    total, term = (torch.empty(images, bits, dtype=torch.float32, device=scale.device) for _ in range(2))
    scale, shift = scale.contiguous(), shift.contiguous()
    _head[(bits, images)](weight, bias, scale, shift, factor, total, term, channels, BLOCK=1024, num_warps=4)
    return factor, total, term


def fused_lens(x: Tensor, head: BitHead, unit: str) -> tuple[Tensor, ...]:
    """Of the tokens x [B, N, C] what a `Look` holds; entropy is a sum over bits or their mean."""
    images, tokens, channels = x.shape
    sizes, width = sizes_of(head)
    parts = parts_of(tokens, channels)
    sums = torch.empty(parts, images, tokens, width + 16, dtype=torch.float32, device=x.device)
    entropy, products, moments = (
        torch.empty(images, tokens, *n, dtype=torch.float32, device=x.device) for n in ((), (width,), (2,))
    )
    _sums[(triton.cdiv(tokens, TOKENS), parts, images)](
        x, head.factor, sums, tokens, channels, channels // parts, *x.stride()[:2], **sizes, **BLOCKS
    )
    _entropy[(triton.cdiv(tokens, FEW), images)](
        sums,
        entropy,
        products,
        moments,
        head.total,
        head.term,
        tokens,
        channels,
        head.eps,
        share_of(head, unit),
        **sizes,
        TOKENS=FEW,
        PARTS=parts,
        num_warps=4,
    )
    return entropy, products, moments


BLOCKS = {"TOKENS": TOKENS, "STEP": STEP, "num_warps": 4, "num_stages": 3}


def sizes_of(head: BitHead) -> tuple[dict[str, int], int]:
    bits = head.total.shape[1]
    block = max(triton.next_power_of_2(bits), 16)
    return {"BITS": bits, "BLOCK_BITS": block}, block


def parts_of(tokens: int, channels: int) -> int:
    """Not by the number of images: a batch must give exactly what its images give."""
    parts = 1
    groups = triton.cdiv(tokens, TOKENS)
    while parts < MOST and 2 * parts * groups <= PROGRAMS and channels % (2 * parts * STEP) == 0:
        parts *= 2
    return parts


def share_of(head: BitHead, unit: str) -> float:
    return 1 / head.total.shape[1] if unit == "bit" else 1.0


@triton.jit
def _head(weight_at, bias_at, scale_at, shift_at, factor_at, total_at, term_at, channels, BLOCK: tl.constexpr):
    """A program takes a bit: the difference of its two logits."""
    bit, image = tl.program_id(0), tl.program_id(1)
    bits = tl.num_programs(0)
    total = tl.zeros((BLOCK,), tl.float32)
    term = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        real = channel < channels
        one = tl.load(weight_at + (2 * bit + 1) * channels + channel, mask=real, other=0.0)
        weight = one - tl.load(weight_at + 2 * bit * channels + channel, mask=real, other=0.0)
        factor = (1 + tl.load(scale_at + image * channels + channel, mask=real, other=0.0)) * weight
        tl.store(factor_at + (image * channels + channel) * bits + bit, factor, mask=real)
        total += factor
        term += weight * tl.load(shift_at + image * channels + channel, mask=real, other=0.0)
    rest = tl.load(bias_at + 2 * bit + 1) - tl.load(bias_at + 2 * bit)
    tl.store(total_at + image * bits + bit, tl.sum(total, 0))
    tl.store(term_at + image * bits + bit, tl.sum(term, 0) + rest)


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


@triton.jit(do_not_specialize=["tokens"])
def _entropy(
    sums_at,
    entropy_at,
    products_at,
    moments_at,
    total_at,
    term_at,
    tokens,
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
    products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
    sums = tl.zeros((TOKENS,), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for part in tl.static_range(PARTS):
        at = sums_at + ((part * tl.num_programs(1) + image) * tokens + token) * (BLOCK_BITS + 16)
        products += tl.load(at[:, None] + bit[None, :], mask=real[:, None], other=0.0)
        sums += tl.load(at + BLOCK_BITS, mask=real, other=0.0)
        squares += tl.load(at + BLOCK_BITS + 1, mask=real, other=0.0)
    mean = sums / channels
    variance = tl.maximum(squares / channels - mean * mean, 0.0)
    deviation = tl.sqrt(variance + eps)
    here = image * tokens + token
    tl.store(moments_at + here * 2, mean, mask=real)
    tl.store(moments_at + here * 2 + 1, variance, mask=real)
    tl.store(products_at + here[:, None] * BLOCK_BITS + bit[None, :], products, mask=real[:, None])
    entropy = of_bits(products, mean, deviation, total_at + image * BITS, term_at + image * BITS, BITS, BLOCK_BITS)
    tl.store(entropy_at + here, entropy * by, mask=real)


@triton.jit
def of_bits(products, mean, deviation, total_at, term_at, BITS: tl.constexpr, BLOCK_BITS: tl.constexpr):
    """The entropy of tokens, a sum over bits."""
    bit = tl.arange(0, BLOCK_BITS)
    known = bit < BITS
    total = tl.load(total_at + bit, mask=known, other=0.0)
    term = tl.load(term_at + bit, mask=known, other=0.0)
    z = (products - mean[:, None] * total[None, :]) / deviation[:, None] + term[None, :]
    # Two outcomes need one number: H = softplus(z) - z sigmoid(z).
    softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
    return tl.sum(tl.where(known[None, :], softplus - z * tl.sigmoid(z), 0.0), 1)
