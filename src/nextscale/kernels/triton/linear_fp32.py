"""A program takes some tokens, all outputs and some input channels; another kernel adds up the splits."""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton

TOKENS = 64  # that a program holds at once
PROGRAMS = 264  # that run at once on a large GPU
MAX_SPLITS = 8
SUM_BLOCK = 1024  # numbers of a program that adds up splits


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply the layer to x [R, N, C]: [R, N, outputs]."""
    rows, tokens, channels = x.shape
    outputs, count = len(weight), rows * tokens
    block = max(triton.next_power_of_2(outputs), 16)
    step = 64 if block <= 64 else 32  # channels that a program holds at once
    y = torch.empty(rows, tokens, outputs, dtype=torch.float32, device=x.device)
    splits = 1  # whatever the number of rows: a batch must give exactly what its images give
    groups = triton.cdiv(2 * tokens, TOKENS)
    while splits < MAX_SPLITS and 2 * splits * groups <= PROGRAMS and channels % (2 * splits * step) == 0:
        splits *= 2
    partials = y if splits == 1 else torch.empty(splits, count, outputs, dtype=torch.float32, device=x.device)
    _linear[(triton.cdiv(count, TOKENS), splits)](
        x.contiguous(),
        weight,
        bias,
        partials,
        count,
        channels,
        channels // splits,
        OUTPUTS=outputs,
        BLOCK=block,
        TOKENS=TOKENS,
        STEP=step,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _sum_splits[(triton.cdiv(y.numel(), SUM_BLOCK),)](
            partials, y, y.numel(), SPLITS=splits, SUM_BLOCK=SUM_BLOCK, num_warps=4
        )
    return y


@triton.jit(do_not_specialize=["count"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    partials_ptr,
    count,
    channels,
    split_channels,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    real = (token < count)[:, None]
    output = tl.arange(0, BLOCK)
    known = output < OUTPUTS
    channel = tl.program_id(1) * split_channels + tl.arange(0, STEP)
    x_ptrs = x_ptr + token[:, None] * channels + channel[None, :]
    weight_ptrs = weight_ptr + output[None, :] * channels + channel[:, None]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for _ in tl.range(0, split_channels, STEP):
        x = tl.load(x_ptrs, mask=real, other=0.0)
        weight = tl.load(weight_ptrs, mask=known[None, :], other=0.0)
        total = tl.dot(x, weight, total, input_precision="tf32x3")
        x_ptrs += STEP
        weight_ptrs += STEP
    if tl.program_id(1) == 0:  # one of the splits has the bias
        total += tl.load(bias_ptr + output, mask=known, other=0.0)[None, :]
    to = partials_ptr + (tl.program_id(1) * count.to(tl.int64) + token[:, None]) * OUTPUTS + output[None, :]
    tl.store(to, total, mask=real & known[None, :])


@triton.jit(do_not_specialize=["count"])
def _sum_splits(partials_ptr, y_ptr, count, SPLITS: tl.constexpr, SUM_BLOCK: tl.constexpr):
    offset = tl.program_id(0) * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
    real = offset < count
    total = tl.zeros((SUM_BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials_ptr + split * count.to(tl.int64) + offset, mask=real, other=0.0)
    tl.store(y_ptr + offset, total, mask=real)
