"""Maps are [B, pixels, C] here. Sums over some pixels, then over all of them, then the map itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nextscale.kernels.fp8 import Reads
from nextscale.kernels.triton.fp8 import as_read

TILE = 4096  # numbers that a program holds at once
PARTS = 264  # programs that share the pixels of a picture: two for every processor of a large GPU
APPLIED, STEPS = 2048, 8  # the same where the norm is applied, and tiles of a program there
AHEAD = 5  # tiles that are on their way while one is at work


def fused_norm(
    x: Tensor, offset: Tensor | None, norm: nn.GroupNorm, silu: bool, inplace: bool, sums: Tensor | None, reads: Reads
) -> Tensor:
    """`sums` of x, if they are known."""
    batch, channels, height, width = x.shape
    pixels, rows = height * width, max(APPLIED // channels, 1)
    affine = factors(x, offset, norm, sums)
    out = x if inplace and reads.dtype == x.dtype else torch.empty_like(x, dtype=reads.dtype)
    grid = (triton.cdiv(pixels, rows * STEPS), batch)
    _apply[grid](
        x, affine, out, pixels, reads.by, CHANNELS=channels, ROWS=rows, STEPS=STEPS, AHEAD=AHEAD, SILU=silu, num_warps=4
    )
    return out


def factors(x: Tensor, offset: Tensor | None, norm: nn.GroupNorm, sums: Tensor | None) -> Tensor:
    """What the norm comes to: a factor and a term for every channel, [B, 2, C]."""
    batch, channels, height, width = x.shape
    groups = norm.num_groups
    if sums is None:
        sums = _summed(x, None, offset, groups)
    parts = sums.shape[3]
    affine = torch.empty(batch, 2, channels, dtype=torch.float32, device=x.device)
    added = x if offset is None else offset
    sizes = {"CHANNELS": channels, "GROUPS": groups, "HAS_OFFSET": offset is not None}
    count = float(height * width * (channels // groups))
    _affine[(groups, batch)](
        sums, added, norm.weight, norm.bias, affine, parts, count, norm.eps, BLOCK=1024, **sizes, num_warps=4
    )
    return affine


def fused_join(x: Tensor, h: Tensor, offset: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """In the place of h, and the sums that the next norm asks for."""
    return h, _summed(x, h, offset, groups)


def _summed(x: Tensor, h: Tensor | None, offset: Tensor | None, groups: int) -> Tensor:
    """Sums and sums of squares of every group over parts of the pixels, [B, 2, groups, parts]."""
    batch, channels, height, width = x.shape
    pixels, rows = height * width, TILE // channels
    parts = min(PARTS, triton.cdiv(pixels, rows))
    each = triton.cdiv(triton.cdiv(pixels, parts), rows) * rows  # pixels of a part
    sums = torch.empty(batch, 2, groups, parts, dtype=torch.float32, device=x.device)
    _sums[(parts, batch)](
        x,
        x if h is None else h,
        x if offset is None else offset,
        sums,
        pixels,
        each,
        parts,
        CHANNELS=channels,
        GROUPS=groups,
        HAS_OFFSET=offset is not None,
        JOIN=h is not None,
        ROWS=rows,
        AHEAD=AHEAD,
        num_warps=4,
    )
    return sums


@triton.jit
def _sums(
    x_at,
    h_at,
    offset_at,
    sums_at,
    pixels,
    each,
    parts,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    JOIN: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Of x + offset; or of x + h + offset, which is also put into the place of h."""
    picture = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, CHANNELS)[None, :]
    first = tl.program_id(0) * each
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    offset = tl.zeros((1, CHANNELS), tl.float32)
    if HAS_OFFSET:
        offset = tl.load(offset_at + channel).to(tl.float32)
    for start in tl.range(first, tl.minimum(first + each, pixels), ROWS, num_stages=AHEAD):
        pixel = start + tl.arange(0, ROWS)[:, None]
        real = pixel < pixels
        at = (picture * pixels + pixel) * CHANNELS + channel
        x = tl.load(x_at + at, mask=real, other=0.0).to(tl.float32) + offset
        if JOIN:
            rounded = (x + tl.load(h_at + at, mask=real, other=0.0)).to(h_at.dtype.element_ty)
            tl.store(h_at + at, rounded, mask=real)
            x = rounded.to(tl.float32)
        x = tl.where(real, x, 0.0)
        total += x
        squares += x * x
    group = tl.arange(0, GROUPS)
    to = sums_at + (picture * 2 * GROUPS + group) * parts + tl.program_id(0)
    tl.store(to, tl.sum(tl.reshape(tl.sum(total, 0), (GROUPS, CHANNELS // GROUPS)), 1))
    tl.store(to + GROUPS * parts, tl.sum(tl.reshape(tl.sum(squares, 0), (GROUPS, CHANNELS // GROUPS)), 1))


@triton.jit
def _affine(
    sums_at,
    offset_at,
    weight_at,
    bias_at,
    affine_at,
    parts,
    count,
    eps,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A group's mean and deviation, as the factor and the term of each of its channels."""
    group, picture = tl.program_id(0), tl.program_id(1)
    at = sums_at + (picture * 2 * GROUPS + group) * parts
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        total += tl.load(at + part, mask=part < parts, other=0.0)
        squares += tl.load(at + GROUPS * parts + part, mask=part < parts, other=0.0)
    mean = tl.sum(total, 0) / count
    square = tl.sum(squares, 0) / count
    deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    channel = group * (CHANNELS // GROUPS) + tl.arange(0, CHANNELS // GROUPS)
    factor = tl.load(weight_at + channel).to(tl.float32) / deviation
    shift = -mean
    if HAS_OFFSET:
        shift += tl.load(offset_at + channel).to(tl.float32)
    term = tl.load(bias_at + channel).to(tl.float32) + shift * factor
    to = affine_at + picture * 2 * CHANNELS + channel
    tl.store(to, factor)
    tl.store(to + CHANNELS, term)


@triton.jit
def _apply(
    x_at,
    affine_at,
    out_at,
    pixels,
    by,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    SILU: tl.constexpr,
):
    picture = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, CHANNELS)[None, :]
    factor = tl.load(affine_at + picture * 2 * CHANNELS + channel)
    term = tl.load(affine_at + picture * 2 * CHANNELS + CHANNELS + channel)
    first = tl.program_id(0) * ROWS * STEPS
    for start in tl.range(first, tl.minimum(first + ROWS * STEPS, pixels), ROWS, num_stages=AHEAD):
        pixel = start + tl.arange(0, ROWS)[:, None]
        real = pixel < pixels
        at = (picture * pixels + pixel) * CHANNELS + channel
        y = tl.load(x_at + at, mask=real, other=0.0).to(tl.float32) * factor + term
        if SILU:
            y = y / (1.0 + tl.exp2(y * -1.4426950408889634))  # faster than its sigmoid
        tl.store(out_at + at, as_read(y, by, out_at.dtype.element_ty), mask=real)
