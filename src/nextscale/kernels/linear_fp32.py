"""A linear layer in float32 with few outputs, such as a head of bits.

cuBLAS computes in float32 without the tensor cores, and with few outputs it has few blocks. Here three products of
10-bit parts stand for one of 24 bits, and where tokens are few the input channels are dealt out to several blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

try:
    from nextscale.kernels.triton.linear_fp32 import fused_linear
except ImportError:  # a CPU build of torch comes without Triton
    fused_linear = None  # type: ignore[assignment]

MOST = 128  # outputs


def linear_exact(x: Tensor, layer: nn.Linear) -> Tensor:
    """Of x [R, N, C]."""
    return fused_linear(x, layer.weight, layer.bias) if takes(x, layer) else layer(x)


def takes(x: Tensor, layer: nn.Linear) -> bool:
    if fused_linear is None or not x.is_cuda or x.dtype != torch.float32 or layer.weight.dtype != torch.float32:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return x.ndim == 3 and layer.out_features <= MOST and layer.in_features % 64 == 0 and layer.bias is not None
