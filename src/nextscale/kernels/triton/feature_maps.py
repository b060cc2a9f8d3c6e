"""A program takes some cells and all channels.

A token holds `patch` x `patch` cells of the map: channel c of row i and column j is its number c patch^2 + i patch + j.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.triton.resize import between, interpolate

if TYPE_CHECKING:
    from nextscale.engine.schedule import Grid

CELLS = 32  # of a program


def fused_add(features: Tensor, codes: Tensor, grid: Grid, patch: int) -> Tensor:
    """Add codes [B, N, d patch^2] on a grid of tokens, enlarged, to maps [B, d, H, W]."""
    batch, channels, height, width = features.shape
    h, w = grid[0] * patch, grid[1] * patch
    out = torch.empty_like(features)
    _add[(triton.cdiv(height * width, CELLS), batch)](
        features,
        codes.contiguous(),
        out,
        h,
        w,
        height,
        width,
        h / height,
        w / width,
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        PATCH=patch,
        CELLS=CELLS,
        num_warps=4,
    )
    return out


def fused_inputs(features: Tensor, grid: Grid, patch: int) -> Tensor:
    """Resize maps [B, d, H, W] to a grid of tokens, [B, N, d patch^2]."""
    batch, channels, height, width = features.shape
    h, w = grid[0] * patch, grid[1] * patch
    out = torch.empty(batch, grid[0] * grid[1], channels * patch**2, dtype=torch.float32, device=features.device)
    _inputs[(triton.cdiv(h * w, CELLS), batch)](
        features,
        out,
        h,
        w,
        height,
        width,
        height / h,
        width / w,
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        PATCH=patch,
        CELLS=CELLS,
        num_warps=4,
    )
    return out


@triton.jit
def _in_tokens(y, x, w, channel, CHANNELS: tl.constexpr, PATCH: tl.constexpr):
    """Offsets in the tokens of the channels of cells (y, x) of a map that is `w` wide."""
    token = (y // PATCH) * (w // PATCH) + x // PATCH
    inside = y % PATCH * PATCH + x % PATCH
    return token[:, None] * (CHANNELS * PATCH * PATCH) + channel[None, :] * (PATCH * PATCH) + inside[:, None]


@triton.jit(do_not_specialize=["h", "w", "height", "width"])
def _add(
    features_ptr,
    codes_ptr,
    out_ptr,
    h,
    w,
    height,
    width,
    by_row,
    by_column,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PATCH: tl.constexpr,
    CELLS: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    channel = tl.arange(0, BLOCK)
    real = (cell < height * width)[:, None] & (channel < CHANNELS)[None, :]
    nw, ne, sw, se, fr, fc = between(cell, h, w, width, by_row, by_column)
    codes = codes_ptr + image * h * w * CHANNELS
    a = tl.load(codes + _in_tokens(nw // w, nw % w, w, channel, CHANNELS, PATCH), mask=real, other=0.0)
    b = tl.load(codes + _in_tokens(ne // w, ne % w, w, channel, CHANNELS, PATCH), mask=real, other=0.0)
    d = tl.load(codes + _in_tokens(sw // w, sw % w, w, channel, CHANNELS, PATCH), mask=real, other=0.0)
    e = tl.load(codes + _in_tokens(se // w, se % w, w, channel, CHANNELS, PATCH), mask=real, other=0.0)
    at = (image * CHANNELS + channel)[None, :] * (height * width) + cell[:, None]
    new = interpolate(a, b, d, e, fr[:, None], fc[:, None])
    tl.store(out_ptr + at, tl.load(features_ptr + at, mask=real, other=0.0) + new, mask=real)


@triton.jit(do_not_specialize=["h", "w", "height", "width"])
def _inputs(
    features_ptr,
    out_ptr,
    h,
    w,
    height,
    width,
    by_row,
    by_column,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PATCH: tl.constexpr,
    CELLS: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    channel = tl.arange(0, BLOCK)
    real = (cell < h * w)[:, None] & (channel < CHANNELS)[None, :]
    nw, ne, sw, se, fr, fc = between(cell, height, width, w, by_row, by_column)
    planes = features_ptr + (image * CHANNELS + channel)[None, :] * (height * width)
    a = tl.load(planes + nw[:, None], mask=real, other=0.0)
    b = tl.load(planes + ne[:, None], mask=real, other=0.0)
    d = tl.load(planes + sw[:, None], mask=real, other=0.0)
    e = tl.load(planes + se[:, None], mask=real, other=0.0)
    to = out_ptr + image * h * w * CHANNELS + _in_tokens(cell // w, cell % w, w, channel, CHANNELS, PATCH)
    tl.store(to, interpolate(a, b, d, e, fr[:, None], fc[:, None]), mask=real)
