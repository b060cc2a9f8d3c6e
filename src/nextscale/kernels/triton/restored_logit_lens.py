"""The lens on a state that it saw before some of its tokens were changed.

Kept tokens are looked at again. Holes have the products that they had, and those of what they received."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nextscale.kernels.num_sms import processors
from nextscale.kernels.triton.logit_lens import BLOCKS, FEW, TOKENS, of_bits, parts_of, share_of, sizes_of
from nextscale.kernels.triton.resize import between, mixed, nearest

if TYPE_CHECKING:
    from nextscale.kernels.logit_lens import BitHead, Filled, Look


def fused_lens_of_filled(filled: Filled, look: Look, head: BitHead, unit: str) -> None:
    """The same of a state whose holes were filled, from the look at what it was before, which becomes the new one. Its
    moments are already those of now."""
    x, (images, tokens), channels = filled.x, look.entropy.shape, filled.x.shape[2]
    (h, w), (height, wide) = filled.grids
    cached = x if filled.cached is None else filled.cached.contiguous()
    sizes, width = sizes_of(head)
    # Not by the kept tokens: what a picture gives must not depend on the room that others needed.
    parts = parts_of(h * w or tokens, channels)
    room = min(len(filled.chosen.cell), images * tokens)  # for the kept tokens of conditional rows
    sums = torch.empty(parts, images * h * w + room, width, dtype=torch.float32, device=x.device)
    # How many groups of tokens an image keeps, only the device knows: these take one after another.
    kept = min(triton.cdiv(tokens, TOKENS), max(2 * processors(x.device) // (parts * images), 1))
    _sums_of_filled[(kept + triton.cdiv(h * w, TOKENS), parts, images)](
        x,
        filled.chosen.cell,
        filled.chosen.start,
        cached,
        head.factor,
        sums,
        room,
        h * w,
        kept,
        channels // parts,
        CHANNELS=channels,
        EXACT=cached.dtype == torch.float32,
        **sizes,
        **BLOCKS,
    )
    _entropy_of_filled[(triton.cdiv(tokens, FEW), images)](
        sums,
        *look,
        filled.chosen.slot,
        head.total,
        head.term,
        tokens,
        room,
        h,
        w,
        wide,
        h / max(height, 1),
        w / max(wide, 1),
        head.eps,
        share_of(head, unit),
        FILLED=filled.cached is not None,
        BILINEAR=filled.mode == "bilinear",
        **sizes,
        TOKENS=FEW,
        PARTS=parts,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["room", "olds", "kept"])
def _sums_of_filled(
    x_at,
    cell_at,
    start_at,
    cached_at,
    factor_at,
    sums_at,
    room,
    olds,
    kept,
    each,
    CHANNELS: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Products of the kept tokens' new states, and of what the others received, before it was enlarged: that is linear,
    so it may be done afterwards, with fewer numbers."""
    group, part, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    bit = tl.arange(0, BLOCK_BITS)
    known = bit < BITS
    channel = part * each + tl.arange(0, STEP)
    factor_place = factor_at + image * CHANNELS * BITS + channel[:, None] * BITS + bit[None, :]
    many = tl.num_programs(2).to(tl.int64) * olds
    to = sums_at + part * (many + room) * BLOCK_BITS
    if group < kept:
        end = tl.load(start_at + image + 1)
        for first in tl.range(tl.load(start_at + image) + group * TOKENS, end, kept * TOKENS):
            token = first + tl.arange(0, TOKENS)
            real = token < end
            cell = tl.load(cell_at + token, mask=real, other=0).to(tl.int64)
            place = x_at + cell[:, None] * CHANNELS + channel[None, :]
            factors = factor_place
            products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
            for _ in tl.range(0, each, STEP):
                x = tl.load(place, mask=real[:, None], other=0.0)
                factor = tl.load(factors, mask=known[None, :], other=0.0)
                products = tl.dot(x, factor, products, input_precision="tf32x3")
                place += STEP
                factors += STEP * BITS
            tl.store(to + (many + token[:, None]) * BLOCK_BITS + bit[None, :], products, mask=real[:, None])
    else:
        old = (group - kept) * TOKENS + tl.arange(0, TOKENS)
        real = old < olds
        products = tl.zeros((TOKENS, BLOCK_BITS), tl.float32)
        place = cached_at + (image * olds + old[:, None]) * CHANNELS + channel[None, :]
        for _ in tl.range(0, each, STEP):
            x = tl.load(place, mask=real[:, None], other=0.0)
            factor = tl.load(factor_place, mask=known[None, :], other=0.0)
            if EXACT:
                products = tl.dot(x, factor, products, input_precision="tf32x3")
            else:  # three numbers of x's kind have the digits of one in float32
                first = factor.to(x.dtype)
                rest = factor - first.to(tl.float32)
                second = rest.to(x.dtype)
                third = (rest - second.to(tl.float32)).to(x.dtype)
                products = tl.dot(x, first, products)
                products = tl.dot(x, second, products)
                products = tl.dot(x, third, products)
            place += STEP
            factor_place += STEP * BITS
        tl.store(to + (image * olds + old[:, None]) * BLOCK_BITS + bit[None, :], products, mask=real[:, None])


@triton.jit(do_not_specialize=["tokens", "room", "h", "w", "width"])
def _entropy_of_filled(
    sums_at,
    entropy_at,
    products_at,
    moments_at,
    slot_at,
    total_at,
    term_at,
    tokens,
    room,
    h,
    w,
    width,
    by_row,
    by_column,
    eps,
    by,
    FILLED: tl.constexpr,
    BILINEAR: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    bit = tl.arange(0, BLOCK_BITS)[None, :]
    here = image * tokens + token
    slot = tl.load(slot_at + here, mask=real, other=0)
    hole = real & (slot < 0)
    kept = real & (slot >= 0)
    products = tl.load(products_at + here[:, None] * BLOCK_BITS + bit, mask=hole[:, None], other=0.0)
    changed = real if FILLED else kept
    olds = h * w
    if FILLED:
        nw, ne, sw, se, fr, fc = between(token, h, w, width, by_row, by_column)
        old = nearest(token, h, w, width, by_row, by_column)
    many = tl.num_programs(1).to(tl.int64) * olds
    for part in tl.static_range(PARTS):
        sums = sums_at + part * (many + room) * BLOCK_BITS + bit
        products += tl.load(sums + (many + slot)[:, None] * BLOCK_BITS, mask=kept[:, None], other=0.0)
        sums += image * olds * BLOCK_BITS
        if FILLED and BILINEAR:
            a = tl.load(sums + nw[:, None] * BLOCK_BITS, mask=hole[:, None], other=0.0)
            b = tl.load(sums + ne[:, None] * BLOCK_BITS, mask=hole[:, None], other=0.0)
            d = tl.load(sums + sw[:, None] * BLOCK_BITS, mask=hole[:, None], other=0.0)
            e = tl.load(sums + se[:, None] * BLOCK_BITS, mask=hole[:, None], other=0.0)
            products += mixed(a, b, d, e, fr[:, None], fc[:, None])
        elif FILLED:
            products += tl.load(sums + old[:, None] * BLOCK_BITS, mask=hole[:, None], other=0.0)
    tl.store(products_at + here[:, None] * BLOCK_BITS + bit, products, mask=changed[:, None])
    mean = tl.load(moments_at + here * 2, mask=real, other=0.0)
    deviation = tl.sqrt(tl.load(moments_at + here * 2 + 1, mask=real, other=0.0) + eps)
    entropy = of_bits(products, mean, deviation, total_at + image * BITS, term_at + image * BITS, BITS, BLOCK_BITS)
    tl.store(entropy_at + here, entropy * by, mask=changed)
