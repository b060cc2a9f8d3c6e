"""A program takes some tokens of an image and some of their channels; another kernel adds up the splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton

if TYPE_CHECKING:
    from nextscale.kernels.logit_lens import BitHead


TOKENS, STEP = 64, 64  # tokens and channels that a program holds at once
PROGRAMS = 300  # that run at once on a large GPU
MAX_SPLITS = 8
ENTROPY_TOKENS = 8  # of a program that adds up splits


def fused_head(weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor, total and term of a `BitHead`."""
    images, channels = scale.shape
    bits = len(weight) // 2
    factor = torch.empty(images, channels, bits, dtype=torch.float32, device=scale.device)
    total, term = (torch.empty(images, bits, dtype=torch.float32, device=scale.device) for _ in range(2))
    scale, shift = scale.contiguous(), shift.contiguous()
    _head[(bits, images)](weight, bias, scale, shift, factor, total, term, channels, BLOCK=1024, num_warps=4)
    return factor, total, term


def fused_logit_lens(x: Tensor, head: BitHead, unit: str) -> tuple[Tensor, ...]:
    """The `BitStats` of tokens x [B, N, C]; entropy is a sum over bits or their mean."""
    images, tokens, channels = x.shape
    sizes, width = block_sizes(head)
    splits = num_splits(tokens, channels)
    sums = torch.empty(splits, images, tokens, width + 16, dtype=torch.float32, device=x.device)
    entropy, products, moments = (
        torch.empty(images, tokens, *n, dtype=torch.float32, device=x.device) for n in ((), (width,), (2,))
    )
    _sums[(triton.cdiv(tokens, TOKENS), splits, images)](
        x, head.factor, sums, tokens, channels, channels // splits, *x.stride()[:2], **sizes, **BLOCKS
    )
    _entropy[(triton.cdiv(tokens, ENTROPY_TOKENS), images)](
        sums,
        entropy,
        products,
        moments,
        head.total,
        head.term,
        tokens,
        channels,
        head.eps,
        entropy_scale(head, unit),
        **sizes,
        TOKENS=ENTROPY_TOKENS,
        SPLITS=splits,
        num_warps=4,
    )
    return entropy, products, moments


BLOCKS = {"TOKENS": TOKENS, "STEP": STEP, "num_warps": 4, "num_stages": 3}


def block_sizes(head: BitHead) -> tuple[dict[str, int], int]:
    bits = head.total.shape[1]
    block = max(triton.next_power_of_2(bits), 16)
    return {"BITS": bits, "BLOCK_BITS": block}, block


def num_splits(tokens: int, channels: int) -> int:
    """Whatever the number of images: a batch must give exactly what its images give."""
    splits = 1
    groups = triton.cdiv(tokens, TOKENS)
    while splits < MAX_SPLITS and 2 * splits * groups <= PROGRAMS and channels % (2 * splits * STEP) == 0:
        splits *= 2
    return splits


def entropy_scale(head: BitHead, unit: str) -> float:
    return 1 / head.total.shape[1] if unit == "bit" else 1.0


@triton.jit
def _head(weight_ptr, bias_ptr, scale_ptr, shift_ptr, factor_ptr, total_ptr, term_ptr, channels, BLOCK: tl.constexpr):
    """A program takes a bit: the difference of its two logits."""
    bit, image = tl.program_id(0), tl.program_id(1)
    bits = tl.num_programs(0)
    total = tl.zeros((BLOCK,), tl.float32)
    term = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        real = channel < channels
        one = tl.load(weight_ptr + (2 * bit + 1) * channels + channel, mask=real, other=0.0)
        weight = one - tl.load(weight_ptr + 2 * bit * channels + channel, mask=real, other=0.0)
        factor = (1 + tl.load(scale_ptr + image * channels + channel, mask=real, other=0.0)) * weight
        tl.store(factor_ptr + (image * channels + channel) * bits + bit, factor, mask=real)
        total += factor
        term += weight * tl.load(shift_ptr + image * channels + channel, mask=real, other=0.0)
    rest = tl.load(bias_ptr + 2 * bit + 1) - tl.load(bias_ptr + 2 * bit)
    tl.store(total_ptr + image * bits + bit, tl.sum(total, 0))
    tl.store(term_ptr + image * bits + bit, tl.sum(term, 0) + rest)


@triton.jit(do_not_specialize=["tokens"])
def _sums(
    x_ptr,
    factor_ptr,
    sums_ptr,
    tokens,
    channels,
    split_channels,
    x_image,
    x_token,
    BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """For a split of the channels: products with the head's weights, sum, and sum of squares."""
    split, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    bit = tl.arange(0, BLOCK_BITS)
    known = bit < BITS
    channel = split * split_channels + tl.arange(0, STEP)
    x_ptrs = x_ptr + image * x_image + token[:, None] * x_token + channel[None, :]
    factor_ptrs = factor_ptr + image * channels * BITS + channel[:, None] * BITS + bit[None, :]
    products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
    sums = tl.zeros((TOKENS, STEP), tl.float32)
    squares = tl.zeros((TOKENS, STEP), tl.float32)
    for _ in tl.range(0, split_channels, STEP):
        x = tl.load(x_ptrs, mask=real[:, None], other=0.0)
        factor = tl.load(factor_ptrs, mask=known[None, :], other=0.0)
        # Three products of 10-bit parts have nearly the digits of one in float32.
        products = tl.dot(x, factor, products, input_precision="tf32x3")
        sums += x
        squares += x * x
        x_ptrs += STEP
        factor_ptrs += STEP * BITS
    to = sums_ptr + ((split * tl.num_programs(2) + image) * tokens + token) * (BLOCK_BITS + 16)
    tl.store(to[:, None] + bit[None, :], products, mask=real[:, None])
    tl.store(to + BLOCK_BITS, tl.sum(sums, 1), mask=real)
    tl.store(to + BLOCK_BITS + 1, tl.sum(squares, 1), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _entropy(
    sums_ptr,
    entropy_ptr,
    products_ptr,
    moments_ptr,
    total_ptr,
    term_ptr,
    tokens,
    channels,
    eps,
    scale,
    BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    bit = tl.arange(0, BLOCK_BITS)
    products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
    sums = tl.zeros((TOKENS,), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for split in tl.static_range(SPLITS):
        at = sums_ptr + ((split * tl.num_programs(1) + image) * tokens + token) * (BLOCK_BITS + 16)
        products += tl.load(at[:, None] + bit[None, :], mask=real[:, None], other=0.0)
        sums += tl.load(at + BLOCK_BITS, mask=real, other=0.0)
        squares += tl.load(at + BLOCK_BITS + 1, mask=real, other=0.0)
    mean = sums / channels
    variance = tl.maximum(squares / channels - mean * mean, 0.0)
    deviation = tl.sqrt(variance + eps)
    here = image * tokens + token
    tl.store(moments_ptr + here * 2, mean, mask=real)
    tl.store(moments_ptr + here * 2 + 1, variance, mask=real)
    tl.store(products_ptr + here[:, None] * BLOCK_BITS + bit[None, :], products, mask=real[:, None])
    entropy = bits_entropy(
        products, mean, deviation, total_ptr + image * BITS, term_ptr + image * BITS, BITS, BLOCK_BITS
    )
    tl.store(entropy_ptr + here, entropy * scale, mask=real)


@triton.jit
def bits_entropy(products, mean, deviation, total_ptr, term_ptr, BITS: tl.constexpr, BLOCK_BITS: tl.constexpr):
    """The entropy of tokens, a sum over bits."""
    bit = tl.arange(0, BLOCK_BITS)
    known = bit < BITS
    total = tl.load(total_ptr + bit, mask=known, other=0.0)
    term = tl.load(term_ptr + bit, mask=known, other=0.0)
    z = (products - mean[:, None] * total[None, :]) / deviation[:, None] + term[None, :]
    # Two outcomes need one number: H = softplus(z) - z sigmoid(z).
    softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
    return tl.sum(tl.where(known[None, :], softplus - z * tl.sigmoid(z), 0.0), 1)
