"""The logit lens on a state that changed in place since its last statistics.

Kept tokens are computed again. To the products of pruned tokens, those of what they received are added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.occupancy import num_sms
from nextscale.kernels.triton.logit_lens import (
    BLOCKS,
    ENTROPY_TOKENS,
    TOKENS,
    bits_entropy,
    block_sizes,
    entropy_scale,
    num_splits,
)
from nextscale.kernels.triton.resize import between, interpolate, nearest

if TYPE_CHECKING:
    from nextscale.kernels.logit_lens import BitHead, BitStats, RestoredState


def fused_restored_logit_lens(restored: RestoredState, stats: BitStats, head: BitHead, unit: str) -> None:
    """Update the statistics of a state after its pruned tokens were restored. The moments are already up to date."""
    x, (images, tokens), channels = restored.x, stats.entropy.shape, restored.x.shape[2]
    (h, w), (height, map_width) = restored.grids
    cached = x if restored.cached is None else restored.cached.contiguous()
    sizes, width = block_sizes(head)
    # Whatever is kept: the result of an image must not depend on the capacity that others needed.
    splits = num_splits(h * w or tokens, channels)
    capacity = min(len(restored.chosen.cell), images * tokens)  # for the kept tokens of conditional rows
    sums = torch.empty(splits, images * h * w + capacity, width, dtype=torch.float32, device=x.device)
    # How many groups of tokens an image keeps, only the device knows: these take one after another.
    kept = min(triton.cdiv(tokens, TOKENS), max(2 * num_sms(x.device) // (splits * images), 1))
    _restored_sums[(kept + triton.cdiv(h * w, TOKENS), splits, images)](
        x,
        restored.chosen.cell,
        restored.chosen.start,
        cached,
        head.factor,
        sums,
        capacity,
        h * w,
        kept,
        channels // splits,
        CHANNELS=channels,
        EXACT=cached.dtype == torch.float32,
        **sizes,
        **BLOCKS,
    )
    _restored_entropy[(triton.cdiv(tokens, ENTROPY_TOKENS), images)](
        sums,
        *stats,
        restored.chosen.slot,
        head.total,
        head.term,
        tokens,
        capacity,
        h,
        w,
        map_width,
        h / max(height, 1),
        w / max(map_width, 1),
        head.eps,
        entropy_scale(head, unit),
        RESTORED=restored.cached is not None,
        BILINEAR=restored.mode == "bilinear",
        **sizes,
        TOKENS=ENTROPY_TOKENS,
        SPLITS=splits,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["capacity", "old_cells", "kept"])
def _restored_sums(
    x_ptr,
    cell_ptr,
    start_ptr,
    cached_ptr,
    factor_ptr,
    sums_ptr,
    capacity,
    old_cells,
    kept,
    split_channels,
    CHANNELS: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Products of the kept tokens' new states, and of what the others received, before it was enlarged: that is linear,
    so it can be done afterwards, with fewer numbers."""
    group, split, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    bit = tl.arange(0, BLOCK_BITS)
    known = bit < BITS
    channel = split * split_channels + tl.arange(0, STEP)
    factor_ptrs = factor_ptr + image * CHANNELS * BITS + channel[:, None] * BITS + bit[None, :]
    old_total = tl.num_programs(2).to(tl.int64) * old_cells
    to = sums_ptr + split * (old_total + capacity) * BLOCK_BITS
    if group < kept:
        end = tl.load(start_ptr + image + 1)
        for first in tl.range(tl.load(start_ptr + image) + group * TOKENS, end, kept * TOKENS):
            token = first + tl.arange(0, TOKENS)
            real = token < end
            cell = tl.load(cell_ptr + token, mask=real, other=0).to(tl.int64)
            x_ptrs = x_ptr + cell[:, None] * CHANNELS + channel[None, :]
            channel_affine = factor_ptrs
            products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
            for _ in tl.range(0, split_channels, STEP):
                x = tl.load(x_ptrs, mask=real[:, None], other=0.0)
                factor = tl.load(channel_affine, mask=known[None, :], other=0.0)
                products = tl.dot(x, factor, products, input_precision="tf32x3")
                x_ptrs += STEP
                channel_affine += STEP * BITS
            tl.store(to + (old_total + token[:, None]) * BLOCK_BITS + bit[None, :], products, mask=real[:, None])
    else:
        old = (group - kept) * TOKENS + tl.arange(0, TOKENS)
        real = old < old_cells
        products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
        x_ptrs = cached_ptr + (image * old_cells + old[:, None]) * CHANNELS + channel[None, :]
        for _ in tl.range(0, split_channels, STEP):
            x = tl.load(x_ptrs, mask=real[:, None], other=0.0)
            factor = tl.load(factor_ptrs, mask=known[None, :], other=0.0)
            if EXACT:
                products = tl.dot(x, factor, products, input_precision="tf32x3")
            else:  # three numbers of x's dtype have the digits of one in float32
                first = factor.to(x.dtype)
                rest = factor - first.to(tl.float32)
                second = rest.to(x.dtype)
                third = (rest - second.to(tl.float32)).to(x.dtype)
                products = tl.dot(x, first, products)
                products = tl.dot(x, second, products)
                products = tl.dot(x, third, products)
            x_ptrs += STEP
            factor_ptrs += STEP * BITS
        tl.store(to + (image * old_cells + old[:, None]) * BLOCK_BITS + bit[None, :], products, mask=real[:, None])


@triton.jit(do_not_specialize=["tokens", "capacity", "h", "w", "width"])
def _restored_entropy(
    sums_ptr,
    entropy_ptr,
    products_ptr,
    moments_ptr,
    slot_ptr,
    total_ptr,
    term_ptr,
    tokens,
    capacity,
    h,
    w,
    width,
    by_row,
    by_column,
    eps,
    scale,
    RESTORED: tl.constexpr,
    BILINEAR: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    bit = tl.arange(0, BLOCK_BITS)[None, :]
    here = image * tokens + token
    slot = tl.load(slot_ptr + here, mask=real, other=0)
    pruned = real & (slot < 0)
    kept = real & (slot >= 0)
    products = tl.load(products_ptr + here[:, None] * BLOCK_BITS + bit, mask=pruned[:, None], other=0.0)
    changed = real if RESTORED else kept
    old_cells = h * w
    if RESTORED:
        nw, ne, sw, se, fr, fc = between(token, h, w, width, by_row, by_column)
        old = nearest(token, h, w, width, by_row, by_column)
    old_total = tl.num_programs(1).to(tl.int64) * old_cells
    for split in tl.static_range(SPLITS):
        sums = sums_ptr + split * (old_total + capacity) * BLOCK_BITS + bit
        products += tl.load(sums + (old_total + slot)[:, None] * BLOCK_BITS, mask=kept[:, None], other=0.0)
        sums += image * old_cells * BLOCK_BITS
        if RESTORED and BILINEAR:
            a = tl.load(sums + nw[:, None] * BLOCK_BITS, mask=pruned[:, None], other=0.0)
            b = tl.load(sums + ne[:, None] * BLOCK_BITS, mask=pruned[:, None], other=0.0)
            d = tl.load(sums + sw[:, None] * BLOCK_BITS, mask=pruned[:, None], other=0.0)
            e = tl.load(sums + se[:, None] * BLOCK_BITS, mask=pruned[:, None], other=0.0)
            products += interpolate(a, b, d, e, fr[:, None], fc[:, None])
        elif RESTORED:
            products += tl.load(sums + old[:, None] * BLOCK_BITS, mask=pruned[:, None], other=0.0)
    tl.store(products_ptr + here[:, None] * BLOCK_BITS + bit, products, mask=changed[:, None])
    mean = tl.load(moments_ptr + here * 2, mask=real, other=0.0)
    deviation = tl.sqrt(tl.load(moments_ptr + here * 2 + 1, mask=real, other=0.0) + eps)
    entropy = bits_entropy(
        products, mean, deviation, total_ptr + image * BITS, term_ptr + image * BITS, BITS, BLOCK_BITS
    )
    tl.store(entropy_ptr + here, entropy * scale, mask=changed)
