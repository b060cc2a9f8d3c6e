"""A linear layer in float32 with few outputs, such as a head of bits.

cuBLAS computes in float32 without tensor cores, and with few outputs it has few blocks. Here three products of 10-bit
parts stand for one of 24 bits, and where tokens are few, several blocks split the input channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nextscale.kernels import dispatch
from nextscale.kernels.triton.linear_fp32 import fused_linear

MAX_OUT_FEATURES = 128


def linear_fp32(x: Tensor, layer: nn.Linear) -> Tensor:
    """Apply the layer to x [R, N, C]."""
    return fused_linear(x, layer.weight, layer.bias) if supports(x, layer) else layer(x)


def supports(x: Tensor, layer: nn.Linear) -> bool:
    if not dispatch.enabled(x) or not dispatch.inference() or not x.dtype == layer.weight.dtype == torch.float32:
        return False
    fits = layer.out_features <= MAX_OUT_FEATURES and layer.in_features % 64 == 0
    return x.ndim == 3 and fits and layer.bias is not None
