"""A program takes all rows, some output channels, and all input channels or a part of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.overlap import early, fetch, wait_for_inputs

LINE = 64  # numbers of 16 bits that memory hands out at once
STAGES = 4  # blocks that are loaded ahead


def fused_parts(x: Tensor, weight: Tensor, parts: int, block_out: int, block_in: int) -> Tensor:
    """[parts, R, K, C_out] of x [R, K, C_in]."""
    sums = torch.empty(parts, *x.shape[:-1], len(weight), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, sums, parts, block_out, block_in, gelu=False)
    return sums


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None, block_out: int, block_in: int, gelu: bool) -> Tensor:
    """[R, K, C_out] of x [R, K, C_in]."""
    out = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, 1, block_out, block_in, gelu)
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, to: Tensor, parts: int, block_out: int, block_in: int, gelu: bool
) -> None:
    flat = x.reshape(-1, x.shape[-1])
    rows, into = flat.shape
    out = len(weight)
    _linear[(out // block_out, parts)](
        flat.contiguous(),
        weight,
        weight if bias is None else bias,
        to,
        rows,
        out,
        into,
        into // parts,
        ROWS=max(16, triton.next_power_of_2(rows)),
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        LINE=LINE,
        BIAS=bias is not None,
        GELU=gelu,
        num_warps=4,
        num_stages=STAGES,
        **early(),
    )


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_at,
    weight_at,
    bias_at,
    to_at,
    rows,
    out,
    into,
    each,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    LINE: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    EARLY: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    start = tl.program_id(1) * each
    weight_row = weight_at + channel[:, None].to(tl.int64) * into + start
    if EARLY:  # reading the weights is all the work: begin with it while others still compute the input
        line = tl.arange(0, BLOCK_IN // LINE) * LINE
        for first in tl.range(0, each, BLOCK_IN):
            fetch(weight_row + first + line[None, :])
    wait_for_inputs(EARLY)
    row = tl.arange(0, ROWS)
    real = row < rows
    source = tl.arange(0, BLOCK_IN)
    # The weights are the larger matrix, so they are the one whose rows the tensor cores want many of.
    weight_place = weight_row + source[None, :]
    x_place = x_at + row[None, :] * into + start + source[:, None]
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for _ in tl.range(0, each, BLOCK_IN):
        weight = tl.load(weight_place)
        x = tl.load(x_place, mask=real[None, :], other=0.0)
        total = tl.dot(weight, x, total)
        weight_place += BLOCK_IN
        x_place += BLOCK_IN
    if BIAS:
        total += tl.load(bias_at + channel).to(tl.float32)[:, None]
    if GELU:  # x / 2 (1 + tanh z) = x sigmoid(2 z)
        total *= tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
    to = to_at + (tl.program_id(1) * rows + row[None, :]) * out + channel[:, None]
    tl.store(to, total.to(to_at.dtype.element_ty), mask=real[None, :])
