"""A program takes all rows, some output channels and some input channels."""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.kernels.dispatch import tl, triton


def fused_split_k(x: Tensor, weight: Tensor, scale: float, splits: int, block_out: int, block_in: int) -> Tensor:
    """Partial products [splits, R, K, C_out] of x [R, K, C_in], times `scale`."""
    flat = x.reshape(-1, x.shape[-1])
    rows, in_features = flat.shape
    out_features = len(weight)
    partials = torch.empty(splits, *x.shape[:-1], out_features, dtype=torch.float32, device=x.device)
    _split_k[(out_features // block_out, splits)](
        flat.contiguous(),
        weight,
        partials,
        scale,
        rows,
        out_features,
        in_features,
        in_features // splits,
        ROWS=max(16, triton.next_power_of_2(rows)),
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=4,
        num_stages=4,
    )
    return partials


@triton.jit(do_not_specialize=["rows"])
def _split_k(
    x_ptr,
    weight_ptr,
    partials_ptr,
    scale,
    rows,
    out_features,
    in_features,
    split_channels,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, ROWS)
    real = row < rows
    source = tl.program_id(1) * split_channels + tl.arange(0, BLOCK_IN)
    # The weights are the larger matrix, so they are the one whose rows the tensor cores want many of.
    weight_ptrs = weight_ptr + channel[:, None].to(tl.int64) * in_features + source[None, :]
    x_ptrs = x_ptr + row[None, :] * in_features + source[:, None]
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for _ in tl.range(0, split_channels, BLOCK_IN):
        weight = tl.load(weight_ptrs)
        x = tl.load(x_ptrs, mask=real[None, :], other=0.0)
        total = tl.dot(weight, x, total)
        weight_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN
    to = partials_ptr + (tl.program_id(1) * rows + row[None, :]) * out_features + channel[:, None]
    tl.store(to, total * scale, mask=real[None, :])
