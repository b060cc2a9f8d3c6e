"""A linear layer with GELU behind it: cuBLAS applies it before it writes, which saves a pass over the widest tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nextscale.kernels import dispatch, ragged_linear
from nextscale.kernels.fp8 import FP8Linear, gelu

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed


def linear_gelu(x: Tensor, layer: nn.Linear | FP8Linear, reader: nn.Module, packed: Packed | None = None) -> Tensor:
    """GELU by its tanh formula of layer(x), x [..., C], for the layer behind it."""
    if packed is not None and ragged_linear.supports(x, layer):
        return ragged_linear.linear(x, layer, packed.start, gelu_for=reader)
    fits = x.is_cuda and x.dtype in dispatch.HALF and not torch.is_grad_enabled()
    if fits and isinstance(layer, nn.Linear):
        return _fused(x, layer.weight, layer.bias)
    return gelu(layer(x), reader)


@torch.library.custom_op("nextscale::linear_gelu", mutates_args=())
def _fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # torch.compile would take it apart again
    flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return flat.view(*x.shape[:-1], len(weight))


@_fused.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
