"""A linear layer for few rows whose result goes into a residual stream.

Then reading the weights is all the work, and cuBLAS has too few blocks to read them at full speed. Here the input
channels are dealt out to several times as many blocks; whoever reads the result adds up their parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nextscale.kernels.fp8 import FORMAT, FP8Linear
from nextscale.kernels.ragged_linear import multiplies, ragged_linear
from nextscale.kernels.split_k import Parts

try:
    from nextscale.kernels.triton.linear_small import fused_parts
except ImportError:  # a CPU build of torch comes without Triton
    fused_parts = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed

MOST, PARTS = 128, 4  # rows, and blocks that share a row's input channels
BLOCK_OUT, BLOCK_IN = 64, 128  # channels of a block


def linear_for_sum(x: Tensor, layer: nn.Linear | FP8Linear, packed: Packed | None = None) -> Tensor | Parts:
    """Of x [R, K, C], or of tokens that lie packed."""
    if packed is not None and multiplies(x, layer):
        return ragged_linear(x, layer, packed.start)
    x = layer.rounded(x) if isinstance(layer, FP8Linear) else x
    if shares(x, layer.weight):
        by = layer.factor if isinstance(layer, FP8Linear) else 1.0
        return Parts(fused_parts(x, layer.weight, by, PARTS, BLOCK_OUT, BLOCK_IN), layer.bias)
    return Parts(layer.product(x)[None], layer.bias) if isinstance(layer, FP8Linear) else layer(x)


def shares(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these, and is faster."""
    if fused_parts is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16, FORMAT):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    out, into = weight.shape
    return x.shape[:-1].numel() <= MOST and out % BLOCK_OUT == 0 and into % (PARTS * BLOCK_IN) == 0
