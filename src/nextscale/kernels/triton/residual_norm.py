"""A program takes one token; of packed tokens, one after another, for only the device knows how many there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton
from nextscale.kernels.occupancy import num_programs
from nextscale.kernels.split_k import SplitKPartials
from nextscale.kernels.triton.fp8 import cast

if TYPE_CHECKING:
    from nextscale.kernels.fp8 import InputFormat
    from nextscale.kernels.residual_norm import Norm
    from nextscale.methods.selection import Packed


def fused_sum_and_norm(
    x: Tensor,
    chosen: Packed | None,
    take: bool,
    delta: Tensor | SplitKPartials | None,
    gate: Tensor | None,
    norm: Norm,
    input_format: InputFormat,
) -> tuple[Tensor, Tensor]:
    """The stream x [R, N, C] with gate * delta [R, N, C] added, and its norm in the input format of a layer.

    Of `chosen` tokens all are [1, T, C], except x where it is the whole stream, to `take` them out of. Gates, factors
    and terms are those of a token's row.
    """
    take = take and chosen is not None
    shape = x.shape if chosen is None else (1, len(chosen.cell), x.shape[-1])
    out = torch.empty(shape, dtype=x.dtype, device=x.device) if take or delta is not None else x
    normed = torch.empty(shape, dtype=input_format.dtype, device=x.device)
    _launch(x, chosen, take, delta, gate, out, norm, normed, input_format.scale)
    return out, normed


def fused_sum(x: Tensor, delta: Tensor | SplitKPartials, gate: Tensor | None, chosen: Packed | None = None) -> Tensor:
    """The sum alone, of x [R, N, C] or of `chosen` tokens [1, T, C]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, chosen, False, delta, gate, out, None, out)
    return out


def _launch(
    x: Tensor,
    chosen: Packed | None,
    take: bool,
    delta: Tensor | SplitKPartials | None,
    gate: Tensor | None,
    out: Tensor,
    norm: Norm | None,
    normed: Tensor,
    out_scale: float = 1.0,
) -> None:
    tokens, channels = normed.shape[:2].numel(), normed.shape[2]
    grid: tuple[int, ...]
    if chosen is None:
        rows, cells = x.shape[:2]
        grid, warps = (cells, rows), _warps(tokens, channels)
    else:
        rows, cells = chosen.slot.shape
        grid, warps = (num_programs(x.device, tokens),), 4 if channels <= 2048 else 8
    factor, term = (norm.factor, norm.term) if norm is not None else (None, None)
    pointers, flags = delta_arguments(delta, gate, x)
    _sum_and_norm[grid](
        x,
        x if chosen is None else chosen.cell,
        x if chosen is None else chosen.start,
        *pointers,
        x if factor is None else factor,
        x if term is None else term,
        out,
        normed,
        rows,
        cells,
        tokens,
        x.stride(0),
        x.stride(1),
        _per_row(factor),
        _per_row(term),
        0.0 if norm is None else norm.eps,
        out_scale,
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        PACKED=chosen is not None,
        TAKE=take,
        **flags,
        SUM=out is not x,
        NORM=norm is not None,
        FACTOR=factor is not None,
        TERM=term is not None,
        PLUS_ONE=norm is not None and norm.plus_one,
        RMS=norm is not None and norm.rms,
        num_warps=warps,
    )


def delta_arguments(
    delta: Tensor | SplitKPartials | None, gate: Tensor | None, placeholder: Tensor
) -> tuple[list[Tensor | int], dict[str, int]]:
    """The arguments of `gated` and their flags; the `placeholder` stands for missing tensors."""
    if delta is not None and not isinstance(delta, SplitKPartials):
        delta = SplitKPartials(delta.contiguous()[None])
    splits = 0 if delta is None else len(delta.partials)
    partials, bias = (None, None) if delta is None else delta
    pointers = [placeholder if t is None else t for t in (partials, bias, gate)]
    flags = {"SPLITS": splits, "BIAS": bias is not None, "GATE": gate is not None}
    return [*pointers, _per_row(gate)], flags


def _warps(programs: int, channels: int) -> int:
    """Few programs have the GPU to themselves."""
    return 16 if programs <= 132 else 4 if channels <= 2048 else 8


def _per_row(vector: Tensor | None) -> int:
    """Stride from one row's vector to the next; 0 if all rows share one."""
    return 0 if vector is None or vector.ndim == 1 or len(vector) == 1 else vector.stride(0)


@triton.jit
def arange_by_4(BLOCK: tl.constexpr):
    """Channels from 0 to BLOCK, ordered so that a thread takes the same ones of float32 and of bfloat16 tensors: no
    numbers have to move between threads."""
    return tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def total(x):
    """The sum over all channels."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def gated(
    delta_ptr,
    bias_ptr,
    gate_ptr,
    token,
    tokens,
    channel,
    real,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
):
    """gate * (output of a linear layer), of the channels of a token; each split has a capacity of `tokens`."""
    at = token * CHANNELS + channel
    delta = tl.load(delta_ptr + at, mask=real, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        delta += tl.load(delta_ptr + split * CHANNELS * tokens.to(tl.int64) + at, mask=real, other=0.0)
    if BIAS:
        delta += tl.load(bias_ptr + channel, mask=real, other=0.0).to(tl.float32)
    if GATE:
        delta *= tl.load(gate_ptr + channel, mask=real, other=0.0)
    return delta


@triton.jit(do_not_specialize=["rows", "cells", "tokens"])
def _sum_and_norm(
    x_ptr,
    cell_ptr,
    start_ptr,
    delta_ptr,
    bias_ptr,
    gate_ptr,
    gate_row,
    factor_ptr,
    term_ptr,
    out_ptr,
    normed_ptr,
    rows,
    cells,
    tokens,  # their capacity
    x_row,
    x_token,
    factor_row,
    term_row,
    eps,
    out_scale,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    TAKE: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    FACTOR: tl.constexpr,
    TERM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    RMS: tl.constexpr,
):
    if PACKED:
        for position in tl.range(tl.program_id(0), tl.load(start_ptr + rows), tl.num_programs(0)):
            at = tl.load(cell_ptr + position)
            row, token = (at // cells).to(tl.int64), tl.cast(position, tl.int64)
            x_token_ptr = x_ptr + (row * x_row + at % cells * x_token if TAKE else token * x_token)
            _token(
                x_token_ptr,
                delta_ptr,
                bias_ptr,
                gate_ptr + row * gate_row,
                factor_ptr + row * factor_row,
                term_ptr + row * term_row,
                out_ptr,
                normed_ptr,
                token,
                tokens,
                eps,
                out_scale,
                CHANNELS,
                BLOCK,
                SPLITS,
                BIAS,
                GATE,
                SUM,
                NORM,
                FACTOR,
                TERM,
                PLUS_ONE,
                RMS,
            )
    else:
        row, cell = tl.program_id(1).to(tl.int64), tl.program_id(0)
        _token(
            x_ptr + row * x_row + cell * x_token,
            delta_ptr,
            bias_ptr,
            gate_ptr + row * gate_row,
            factor_ptr + row * factor_row,
            term_ptr + row * term_row,
            out_ptr,
            normed_ptr,
            row * cells + cell,
            tokens,
            eps,
            out_scale,
            CHANNELS,
            BLOCK,
            SPLITS,
            BIAS,
            GATE,
            SUM,
            NORM,
            FACTOR,
            TERM,
            PLUS_ONE,
            RMS,
        )


@triton.jit
def _token(
    x_ptr,
    delta_ptr,
    bias_ptr,
    gate_ptr,
    factor_ptr,
    term_ptr,
    out_ptr,
    normed_ptr,
    token,
    tokens,
    eps,
    out_scale,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    FACTOR: tl.constexpr,
    TERM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    RMS: tl.constexpr,
):
    """Sum and norm of a token; pointers to x, gate, factor and term are its own."""
    channel = arange_by_4(BLOCK)
    real = channel < CHANNELS
    to = token * CHANNELS + channel
    x = tl.load(x_ptr + channel, mask=real, other=0.0)
    # Asked for before they are needed: the sums over channels make all threads wait.
    if FACTOR:
        factor = tl.load(factor_ptr + channel, mask=real, other=0.0)
    if TERM:
        term = tl.load(term_ptr + channel, mask=real, other=0.0)
    if SPLITS:
        x += gated(delta_ptr, bias_ptr, gate_ptr, token, tokens, channel, real, CHANNELS, SPLITS, BIAS, GATE)
    if SUM:
        tl.store(out_ptr + to, x, mask=real)
    if NORM:
        if not RMS:
            x = tl.where(real, x - total(x) / CHANNELS, 0.0)
        y = x * tl.rsqrt(total(x * x) / CHANNELS + eps)
        if FACTOR:
            y *= factor + 1.0 if PLUS_ONE else factor
        if TERM:
            y += term
        tl.store(normed_ptr + to, cast(y, out_scale, normed_ptr.dtype.element_ty), mask=real)
