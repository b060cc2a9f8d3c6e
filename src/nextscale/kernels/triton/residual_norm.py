"""A program takes one token; of packed tokens, one after another, for only the device knows how many they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.num_sms import programs
from nextscale.kernels.split_k import Parts
from nextscale.kernels.triton.fp8 import as_read

if TYPE_CHECKING:
    from nextscale.kernels.fp8 import Reads
    from nextscale.kernels.residual_norm import Norm
    from nextscale.methods.selection import Packed


def fused_sum_and_norm(
    x: Tensor,
    chosen: Packed | None,
    take: bool,
    delta: Tensor | Parts | None,
    gate: Tensor | None,
    norm: Norm,
    reads: Reads,
) -> tuple[Tensor, Tensor]:
    """The stream x [R, N, C] with gate * delta [R, N, C] added, and its norm as a layer reads it.

    Of `chosen` tokens all is [1, T, C], but for x if it is to `take` them out of the whole stream. Gates, and what the
    norm reads, are those of a token's row.
    """
    take = take and chosen is not None
    shape = x.shape if chosen is None else (1, len(chosen.cell), x.shape[-1])
    out = torch.empty(shape, dtype=x.dtype, device=x.device) if take or delta is not None else x
    normed = torch.empty(shape, dtype=reads.dtype, device=x.device)
    _launch(x, chosen, take, delta, gate, out, norm, normed, reads.by)
    return out, normed


def fused_sum(x: Tensor, delta: Tensor | Parts, gate: Tensor | None, chosen: Packed | None = None) -> Tensor:
    """The sum alone, of x [R, N, C] or of `chosen` tokens [1, T, C]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, chosen, False, delta, gate, out, None, out)
    return out


def _launch(
    x: Tensor,
    chosen: Packed | None,
    take: bool,
    delta: Tensor | Parts | None,
    gate: Tensor | None,
    out: Tensor,
    norm: Norm | None,
    normed: Tensor,
    by: float = 1.0,
) -> None:
    tokens, channels = normed.shape[:2].numel(), normed.shape[2]
    grid: tuple[int, ...]
    if chosen is None:
        rows, cells = x.shape[:2]
        grid, warps = (cells, rows), _warps(tokens, channels)
    else:
        rows, cells = chosen.slot.shape
        grid, warps = (programs(x.device, tokens),), 4 if channels <= 2048 else 8
    factor, term = (norm.factor, norm.term) if norm is not None else (None, None)
    given, kind = pending(delta, gate, x)
    _sum_and_norm[grid](
        x,
        x if chosen is None else chosen.cell,
        x if chosen is None else chosen.start,
        *given,
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
        by,
        CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels),
        PACKED=chosen is not None,
        TAKE=take,
        **kind,
        SUM=out is not x,
        NORM=norm is not None,
        FACTOR=factor is not None,
        TERM=term is not None,
        PLUS_ONE=norm is not None and norm.plus_one,
        RMS=norm is not None and norm.rms,
        num_warps=warps,
    )


def pending(
    delta: Tensor | Parts | None, gate: Tensor | None, some: Tensor
) -> tuple[list[Tensor | int], dict[str, int]]:
    """What `gated` reads, and of which kind it is; `some` tensor stands for what is not there."""
    if delta is not None and not isinstance(delta, Parts):
        delta = Parts(delta.contiguous()[None])
    parts = 0 if delta is None else len(delta.sums)
    sums, bias = (None, None) if delta is None else delta
    given = [some if t is None else t for t in (sums, bias, gate)]
    kind = {"PARTS": parts, "BIAS": bias is not None, "GATE": gate is not None}
    return [*given, _per_row(gate)], kind


def _warps(programs: int, channels: int) -> int:
    """Few programs have the GPU to themselves."""
    return 16 if programs <= 132 else 4 if channels <= 2048 else 8


def _per_row(vector: Tensor | None) -> int:
    """Numbers from one row's vector to the next; 0 if all rows share one."""
    return 0 if vector is None or vector.ndim == 1 or len(vector) == 1 else vector.stride(0)


@triton.jit
def by_fours(BLOCK: tl.constexpr):
    """Channels from 0 to BLOCK: then a thread takes the same ones of a map in float32 and of one in bfloat16, and
    nothing has to change hands."""
    return tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def total(x):
    """Of all channels."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def gated(
    delta_at,
    bias_at,
    gate_at,
    token,
    tokens,
    channel,
    real,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
):
    """gate * (what a linear layer gave), of the channels of a token; each part has room for so many `tokens`."""
    at = token * CHANNELS + channel
    delta = tl.load(delta_at + at, mask=real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        delta += tl.load(delta_at + part * CHANNELS * tokens.to(tl.int64) + at, mask=real, other=0.0)
    if BIAS:
        delta += tl.load(bias_at + channel, mask=real, other=0.0).to(tl.float32)
    if GATE:
        delta *= tl.load(gate_at + channel, mask=real, other=0.0)
    return delta


@triton.jit(do_not_specialize=["rows", "cells", "tokens"])
def _sum_and_norm(
    x_at,
    cell_at,
    start_at,
    delta_at,
    bias_at,
    gate_at,
    gate_row,
    factor_at,
    term_at,
    out_at,
    normed_at,
    rows,
    cells,
    tokens,  # that there is room for
    x_row,
    x_token,
    factor_row,
    term_row,
    eps,
    by,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    TAKE: tl.constexpr,
    PARTS: tl.constexpr,
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
        for place in tl.range(tl.program_id(0), tl.load(start_at + rows), tl.num_programs(0)):
            at = tl.load(cell_at + place)
            row, token = (at // cells).to(tl.int64), tl.cast(place, tl.int64)
            x_place = x_at + (row * x_row + at % cells * x_token if TAKE else token * x_token)
            _one(
                x_place,
                delta_at,
                bias_at,
                gate_at + row * gate_row,
                factor_at + row * factor_row,
                term_at + row * term_row,
                out_at,
                normed_at,
                token,
                tokens,
                eps,
                by,
                CHANNELS,
                BLOCK,
                PARTS,
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
        _one(
            x_at + row * x_row + cell * x_token,
            delta_at,
            bias_at,
            gate_at + row * gate_row,
            factor_at + row * factor_row,
            term_at + row * term_row,
            out_at,
            normed_at,
            row * cells + cell,
            tokens,
            eps,
            by,
            CHANNELS,
            BLOCK,
            PARTS,
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
def _one(
    x_at,
    delta_at,
    bias_at,
    gate_at,
    factor_at,
    term_at,
    out_at,
    normed_at,
    token,
    tokens,
    eps,
    by,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    FACTOR: tl.constexpr,
    TERM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    RMS: tl.constexpr,
):
    """A token whose x, gate, factor and term lie there."""
    channel = by_fours(BLOCK)
    real = channel < CHANNELS
    to = token * CHANNELS + channel
    x = tl.load(x_at + channel, mask=real, other=0.0)
    # Asked for before they are needed: the sums over channels make all threads wait.
    if FACTOR:
        factor = tl.load(factor_at + channel, mask=real, other=0.0)
    if TERM:
        term = tl.load(term_at + channel, mask=real, other=0.0)
    if PARTS:
        x += gated(delta_at, bias_at, gate_at, token, tokens, channel, real, CHANNELS, PARTS, BIAS, GATE)
    if SUM:
        tl.store(out_at + to, x, mask=real)
    if NORM:
        if not RMS:
            x = tl.where(real, x - total(x) / CHANNELS, 0.0)
        y = x * tl.rsqrt(total(x * x) / CHANNELS + eps)
        if FACTOR:
            y *= factor + 1.0 if PLUS_ONE else factor
        if TERM:
            y += term
        tl.store(normed_at + to, as_read(y, by, normed_at.dtype.element_ty), mask=real)
