"""Maps are [B, pixels, C] here: sums over some pixels, then over all of them, then the map itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.fp8 import InputFormat
from nextscale.kernels.triton.fp8 import cast

TILE = 4096  # numbers that a program holds at once
MAX_SPLITS = 264  # of the pixels of an image: two for every SM of a large GPU
APPLY_TILE, STEPS = 2048, 8  # numbers of a tile where the norm is applied, and tiles of a program there
STAGES = 5  # tiles that are on their way while one is computed


def fused_norm(
    x: Tensor,
    offset: Tensor | None,
    norm: nn.GroupNorm,
    silu: bool,
    inplace: bool,
    sums: Tensor | None,
    input_format: InputFormat,
) -> Tensor:
    """Apply the norm; `sums` are those of x, if they are known."""
    batch, channels, height, width = x.shape
    pixels, rows = height * width, max(APPLY_TILE // channels, 1)
    affine = channel_affine(x, offset, norm, sums)
    out = x if inplace and input_format.dtype == x.dtype else torch.empty_like(x, dtype=input_format.dtype)
    grid = (triton.cdiv(pixels, rows * STEPS), batch)
    _apply[grid](
        x,
        affine,
        out,
        pixels,
        input_format.scale,
        CHANNELS=channels,
        ROWS=rows,
        STEPS=STEPS,
        STAGES=STAGES,
        SILU=silu,
        num_warps=4,
    )
    return out


def channel_affine(x: Tensor, offset: Tensor | None, norm: nn.GroupNorm, sums: Tensor | None) -> Tensor:
    """The norm as a factor and a term for every channel, [B, 2, C]."""
    batch, channels, height, width = x.shape
    groups = norm.num_groups
    if sums is None:
        sums = _group_sums(x, None, offset, groups)
    splits = sums.shape[3]
    affine = torch.empty(batch, 2, channels, dtype=torch.float32, device=x.device)
    added = x if offset is None else offset
    sizes = {"CHANNELS": channels, "GROUPS": groups, "HAS_OFFSET": offset is not None}
    count = float(height * width * (channels // groups))
    _affine[(groups, batch)](
        sums, added, norm.weight, norm.bias, affine, splits, count, norm.eps, BLOCK=1024, **sizes, num_warps=4
    )
    return affine


def fused_add(x: Tensor, h: Tensor, offset: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """x + h + offset, written over h, and the sums that the next norm needs."""
    return h, _group_sums(x, h, offset, groups)


def _group_sums(x: Tensor, h: Tensor | None, offset: Tensor | None, groups: int) -> Tensor:
    """Sums and sums of squares of every group over splits of the pixels, [B, 2, groups, splits]."""
    batch, channels, height, width = x.shape
    pixels, rows = height * width, TILE // channels
    splits = min(MAX_SPLITS, triton.cdiv(pixels, rows))
    split_pixels = triton.cdiv(triton.cdiv(pixels, splits), rows) * rows  # pixels of a split
    sums = torch.empty(batch, 2, groups, splits, dtype=torch.float32, device=x.device)
    _sums[(splits, batch)](
        x,
        x if h is None else h,
        x if offset is None else offset,
        sums,
        pixels,
        split_pixels,
        splits,
        CHANNELS=channels,
        GROUPS=groups,
        HAS_OFFSET=offset is not None,
        ADD=h is not None,
        ROWS=rows,
        STAGES=STAGES,
        num_warps=4,
    )
    return sums


@triton.jit
def _sums(
    x_ptr,
    h_ptr,
    offset_ptr,
    sums_ptr,
    pixels,
    split_pixels,
    splits,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums of x + offset; or of x + h + offset, which is also written over h."""
    image = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, CHANNELS)[None, :]
    first = tl.program_id(0) * split_pixels
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    offset = tl.zeros((1, CHANNELS), tl.float32)
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + channel).to(tl.float32)
    for start in tl.range(first, tl.minimum(first + split_pixels, pixels), ROWS, num_stages=STAGES):
        pixel = start + tl.arange(0, ROWS)[:, None]
        real = pixel < pixels
        at = (image * pixels + pixel) * CHANNELS + channel
        x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32) + offset
        if ADD:
            rounded = (x + tl.load(h_ptr + at, mask=real, other=0.0)).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + at, rounded, mask=real)
            x = rounded.to(tl.float32)
        x = tl.where(real, x, 0.0)
        total += x
        squares += x * x
    group = tl.arange(0, GROUPS)
    to = sums_ptr + (image * 2 * GROUPS + group) * splits + tl.program_id(0)
    tl.store(to, tl.sum(tl.reshape(tl.sum(total, 0), (GROUPS, CHANNELS // GROUPS)), 1))
    tl.store(to + GROUPS * splits, tl.sum(tl.reshape(tl.sum(squares, 0), (GROUPS, CHANNELS // GROUPS)), 1))


@triton.jit
def _affine(
    sums_ptr,
    offset_ptr,
    weight_ptr,
    bias_ptr,
    affine_ptr,
    splits,
    count,
    eps,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A group's mean and deviation, as the factor and the term of each of its channels."""
    group, image = tl.program_id(0), tl.program_id(1)
    at = sums_ptr + (image * 2 * GROUPS + group) * splits
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, splits, BLOCK):
        split = start + tl.arange(0, BLOCK)
        total += tl.load(at + split, mask=split < splits, other=0.0)
        squares += tl.load(at + GROUPS * splits + split, mask=split < splits, other=0.0)
    mean = tl.sum(total, 0) / count
    square = tl.sum(squares, 0) / count
    deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    channel = group * (CHANNELS // GROUPS) + tl.arange(0, CHANNELS // GROUPS)
    factor = tl.load(weight_ptr + channel).to(tl.float32) / deviation
    shift = -mean
    if HAS_OFFSET:
        shift += tl.load(offset_ptr + channel).to(tl.float32)
    term = tl.load(bias_ptr + channel).to(tl.float32) + shift * factor
    to = affine_ptr + image * 2 * CHANNELS + channel
    tl.store(to, factor)
    tl.store(to + CHANNELS, term)


@triton.jit
def _apply(
    x_ptr,
    affine_ptr,
    out_ptr,
    pixels,
    out_scale,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    SILU: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, CHANNELS)[None, :]
    factor = tl.load(affine_ptr + image * 2 * CHANNELS + channel)
    term = tl.load(affine_ptr + image * 2 * CHANNELS + CHANNELS + channel)
    first = tl.program_id(0) * ROWS * STEPS
    for start in tl.range(first, tl.minimum(first + ROWS * STEPS, pixels), ROWS, num_stages=STAGES):
        pixel = start + tl.arange(0, ROWS)[:, None]
        real = pixel < pixels
        at = (image * pixels + pixel) * CHANNELS + channel
        y = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32) * factor + term
        if SILU:
            y = y / (1.0 + tl.exp2(y * -1.4426950408889634))  # faster than its sigmoid
        tl.store(out_ptr + at, cast(y, out_scale, out_ptr.dtype.element_ty), mask=real)
