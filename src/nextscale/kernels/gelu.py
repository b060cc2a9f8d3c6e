"""A linear layer with GELU behind it: cuBLAS applies it before it writes, which saves a pass over the widest tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels.fp8 import FP8Linear, Rounded


def linear_gelu(x: Tensor | Rounded, layer: nn.Module) -> Tensor | Rounded:
    """GELU by its tanh formula, of x [..., C]. A layer in 8 bits is followed by another one."""
    if isinstance(layer, FP8Linear):
        return layer.gelu(x)
    assert isinstance(x, Tensor)
    fits = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled()
    if fits and isinstance(layer, nn.Linear):
        return _fused(x, layer.weight, layer.bias)
    return F.gelu(layer(x), approximate="tanh")


@torch.library.custom_op("nextscale::linear_gelu", mutates_args=())
def _fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # torch.compile would take it apart again
    flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return flat.view(*x.shape[:-1], len(weight))


@_fused.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
