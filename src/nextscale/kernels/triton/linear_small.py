"""A program takes all rows, some output channels and some input channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def fused_parts(x: Tensor, weight: Tensor, by: float, parts: int, block_out: int, block_in: int) -> Tensor:
    """[parts, R, K, C_out] of x [R, K, C_in], times `by`."""
    flat = x.reshape(-1, x.shape[-1])
    rows, into = flat.shape
    out = len(weight)
    sums = torch.empty(parts, *x.shape[:-1], out, dtype=torch.float32, device=x.device)
    _parts[(out // block_out, parts)](
        flat.contiguous(),
        weight,
        sums,
        by,
        rows,
        out,
        into,
        into // parts,
        ROWS=max(16, triton.next_power_of_2(rows)),
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=4,
        num_stages=4,
    )
    return sums


@triton.jit(do_not_specialize=["rows"])
def _parts(
    x_at,
    weight_at,
    sums_at,
    by,
    rows,
    out,
    into,
    each,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, ROWS)
    real = row < rows
    source = tl.program_id(1) * each + tl.arange(0, BLOCK_IN)
    # The weights are the larger matrix, so they are the one whose rows the tensor cores want many of.
    weight_place = weight_at + channel[:, None].to(tl.int64) * into + source[None, :]
    x_place = x_at + row[None, :] * into + source[:, None]
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for _ in tl.range(0, each, BLOCK_IN):
        weight = tl.load(weight_place)
        x = tl.load(x_place, mask=real[None, :], other=0.0)
        total = tl.dot(weight, x, total)
        weight_place += BLOCK_IN
        x_place += BLOCK_IN
    to = sums_at + (tl.program_id(1) * rows + row[None, :]) * out + channel[:, None]
    tl.store(to, total * by, mask=real[None, :])
