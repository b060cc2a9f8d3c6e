"""A program takes some cells and all channels.

A token holds `patch` x `patch` cells of the map: channel c of row i and column j is its number c patch^2 + i patch + j.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.triton.resize import between, mixed

if TYPE_CHECKING:
    from nextscale.engine.schedule import Grid

CELLS = 32  # of a program


def fused_add(features: Tensor, codes: Tensor, grid: Grid, patch: int) -> Tensor:
    """Maps [B, d, H, W] with codes [B, N, d patch^2] on a grid of tokens added to them, enlarged."""
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
    """Maps [B, d, H, W] on a grid of tokens, [B, N, d patch^2]."""
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
    """Where tokens hold the channels of the cells (y, x) of a map that is `w` wide."""
    token = (y // PATCH) * (w // PATCH) + x // PATCH
    inside = y % PATCH * PATCH + x % PATCH
    return token[:, None] * (CHANNELS * PATCH * PATCH) + channel[None, :] * (PATCH * PATCH) + inside[:, None]


@triton.jit(do_not_specialize=["h", "w", "height", "width"])
def _add(
    features_at,
    codes_at,
    out_at,
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
    picture = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    channel = tl.arange(0, BLOCK)
    real = (cell < height * width)[:, None] & (channel < CHANNELS)[None, :]
    nw, ne, sw, se, fr, fc = between(cell, h, w, width, by_row, by_column)
    codes = codes_at + picture * h * w * CHANNELS
    a = tl.load(codes + _in_tokens(nw // w, nw % w, w, channel, CHANNELS, PATCH), mask=real, other=0.0)
    b = tl.load(codes + _in_tokens(ne // w, ne % w, w, channel, CHANNELS, PATCH), mask=real, other=0.0)
    d = tl.load(codes + _in_tokens(sw // w, sw % w, w, channel, CHANNELS, PATCH), mask=real, other=0.0)
    e = tl.load(codes + _in_tokens(se // w, se % w, w, channel, CHANNELS, PATCH), mask=real, other=0.0)
    at = (picture * CHANNELS + channel)[None, :] * (height * width) + cell[:, None]
    new = mixed(a, b, d, e, fr[:, None], fc[:, None])
    tl.store(out_at + at, tl.load(features_at + at, mask=real, other=0.0) + new, mask=real)


@triton.jit(do_not_specialize=["h", "w", "height", "width"])
def _inputs(
    features_at,
    out_at,
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
    picture = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    channel = tl.arange(0, BLOCK)
    real = (cell < h * w)[:, None] & (channel < CHANNELS)[None, :]
    nw, ne, sw, se, fr, fc = between(cell, height, width, w, by_row, by_column)
    planes = features_at + (picture * CHANNELS + channel)[None, :] * (height * width)
    a = tl.load(planes + nw[:, None], mask=real, other=0.0)
    b = tl.load(planes + ne[:, None], mask=real, other=0.0)
    d = tl.load(planes + sw[:, None], mask=real, other=0.0)
    e = tl.load(planes + se[:, None], mask=real, other=0.0)
    to = out_at + picture * h * w * CHANNELS + _in_tokens(cell // w, cell % w, w, channel, CHANNELS, PATCH)
    tl.store(to, mixed(a, b, d, e, fr[:, None], fc[:, None]), mask=real)
