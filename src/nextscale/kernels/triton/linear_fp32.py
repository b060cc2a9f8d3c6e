"""A program takes some tokens, all outputs and some input channels; another kernel adds up the parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64  # that a program holds at once
PROGRAMS = 264  # that run at once on a large GPU
MOST = 8  # parts
NUMBERS = 1024  # of a program that adds up parts


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[R, N, outputs] of x [R, N, C]."""
    rows, tokens, channels = x.shape
    outputs, count = len(weight), rows * tokens
    block = max(triton.next_power_of_2(outputs), 16)
    step = 64 if block <= 64 else 32  # channels that a program holds at once
    y = torch.empty(rows, tokens, outputs, dtype=torch.float32, device=x.device)
    parts = 1  # not by the number of rows: a batch must give exactly what its images give
    groups = triton.cdiv(2 * tokens, TOKENS)
    while parts < MOST and 2 * parts * groups <= PROGRAMS and channels % (2 * parts * step) == 0:
        parts *= 2
    sums = y if parts == 1 else torch.empty(parts, count, outputs, dtype=torch.float32, device=x.device)
    _linear[(triton.cdiv(count, TOKENS), parts)](
        x.contiguous(),
        weight,
        bias,
        sums,
        count,
        channels,
        channels // parts,
        OUTPUTS=outputs,
        BLOCK=block,
        TOKENS=TOKENS,
        STEP=step,
        num_warps=4,
        num_stages=3,
    )
    if parts > 1:
        _add_up[(triton.cdiv(y.numel(), NUMBERS),)](sums, y, y.numel(), PARTS=parts, NUMBERS=NUMBERS, num_warps=4)
    return y


@triton.jit(do_not_specialize=["count"])
def _linear(
    x_at,
    weight_at,
    bias_at,
    sums_at,
    count,
    channels,
    each,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    real = (token < count)[:, None]
    output = tl.arange(0, BLOCK)
    known = output < OUTPUTS
    channel = tl.program_id(1) * each + tl.arange(0, STEP)
    x_place = x_at + token[:, None] * channels + channel[None, :]
    weight_place = weight_at + output[None, :] * channels + channel[:, None]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for _ in tl.range(0, each, STEP):
        x = tl.load(x_place, mask=real, other=0.0)
        weight = tl.load(weight_place, mask=known[None, :], other=0.0)
        total = tl.dot(x, weight, total, input_precision="tf32x3")
        x_place += STEP
        weight_place += STEP
    if tl.program_id(1) == 0:  # one of the parts has the bias
        total += tl.load(bias_at + output, mask=known, other=0.0)[None, :]
    to = sums_at + (tl.program_id(1) * count.to(tl.int64) + token[:, None]) * OUTPUTS + output[None, :]
    tl.store(to, total, mask=real & known[None, :])


@triton.jit(do_not_specialize=["count"])
def _add_up(sums_at, y_at, count, PARTS: tl.constexpr, NUMBERS: tl.constexpr):
    place = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    real = place < count
    total = tl.zeros((NUMBERS,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums_at + part * count.to(tl.int64) + place, mask=real, other=0.0)
    tl.store(y_at + place, total, mask=real)
