"""Linear layers for few rows.

Then reading the weights is all the work, and cuBLAS has too few blocks to read them at full speed, or begins too late.
Where the result goes into a residual stream, input channels are dealt out to several times as many blocks; whoever
reads the result adds up their parts, which is no extra pass: the sum with the stream is waiting anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels.gelu import linear_gelu as cublas_gelu

try:
    from nextscale.kernels.rows_triton import fused_linear, fused_parts
except ImportError:  # a CPU build of torch comes without Triton
    fused_parts = fused_linear = None  # type: ignore[assignment]

MOST, PARTS = 128, 4  # rows, and blocks that share a row's input channels
BLOCK_OUT, BLOCK_IN = 64, 128  # channels of a block


class Parts(NamedTuple):
    """What a linear layer gives, not yet added up."""

    sums: Tensor  # [parts, R, K, C] in float32
    bias: Tensor | None  # [C]

    def total(self) -> Tensor:
        result = self.sums.sum(0)
        return result if self.bias is None else result + self.bias


def linear(x: Tensor, layer: nn.Module, bias: Tensor | None = None) -> Tensor:
    """Of x [R, K, C]; `bias` instead of the layer's own."""
    if not isinstance(layer, nn.Linear):
        return layer(x) if bias is None else layer(x, bias)
    bias = layer.bias if bias is None else bias
    if few(x, layer.weight):
        return fused_linear(x, layer.weight, bias, block_of(layer.weight), BLOCK_IN, gelu=False)
    return F.linear(x, layer.weight, bias)


def linear_gelu(x: Tensor, layer: nn.Module) -> Tensor:
    """With GELU by its tanh formula behind it."""
    if isinstance(layer, nn.Linear) and few(x, layer.weight):
        return fused_linear(x, layer.weight, layer.bias, block_of(layer.weight), BLOCK_IN, gelu=True)
    return cublas_gelu(x, layer)


def linear_for_sum(x: Tensor, layer: nn.Module) -> Tensor | Parts:
    """For a residual stream."""
    if not isinstance(layer, nn.Linear) or not few(x, layer.weight, PARTS):
        return layer(x)
    return Parts(fused_parts(x, layer.weight, PARTS, BLOCK_OUT, BLOCK_IN), layer.bias)


def few(x: Tensor, weight: Tensor, parts: int = 1) -> bool:
    """Whether the kernel takes these, and is faster."""
    if fused_parts is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    out, into = weight.shape
    return x.shape[:-1].numel() <= MOST and out % BLOCK_OUT == 0 and into % (parts * BLOCK_IN) == 0


def block_of(weight: Tensor) -> int:
    """Output channels of a block: so many that there are blocks for all of a large GPU."""
    return next((block for block in (64, 32) if len(weight) // block >= 96), 16)
