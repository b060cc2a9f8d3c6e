"""Linear layers of packed tokens: x [1, T, C] has a capacity of T, and only the device knows how many tokens there are.

cuBLAS would multiply the whole capacity. Here every program first reads the number of tokens, takes its share of them,
and leaves the padding alone.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor, nn

from nextscale.kernels import dispatch
from nextscale.kernels.fp8 import FP8_DTYPE, FP8Linear, InputFormat, input_format
from nextscale.kernels.occupancy import num_sms
from nextscale.kernels.triton.ragged_linear import fused_gated, fused_product

CHANNEL_MULTIPLE, FP8_CHANNEL_MULTIPLE = 64, 128


def supports(x: Tensor, layer: nn.Module) -> bool:
    """Whether the kernel applies the layer to x."""
    if not dispatch.enabled(x) or not dispatch.inference() or not isinstance(layer, (nn.Linear, FP8Linear)):
        return False
    fp8 = isinstance(layer, FP8Linear)
    if x.dtype not in (*dispatch.HALF, FP8_DTYPE) or not (fp8 or x.dtype == layer.weight.dtype != FP8_DTYPE):
        return False
    outputs, channels = layer.weight.shape
    return outputs % CHANNEL_MULTIPLE == 0 and channels % (FP8_CHANNEL_MULTIPLE if fp8 else CHANNEL_MULTIPLE) == 0


def linear(
    x: Tensor,
    layer: nn.Linear | FP8Linear,
    cu_seqlens: Tensor,
    bias: Tensor | Literal["own"] | None = "own",
    gelu_for: nn.Module | None = None,
) -> Tensor:
    """Apply the layer to the first cu_seqlens[-1] tokens of x [1, T, K] -> [1, T, N], undefined behind them.

    `bias` replaces the layer's own. `gelu_for`: GELU by its tanh formula follows, in the input format of that layer.
    Ask `supports` first, and call it in one stream at a time: calls share the counters of a device.
    """
    output_format = InputFormat(layer.weight.dtype)
    scale = 1.0
    if isinstance(layer, FP8Linear):
        output_format, scale = InputFormat(layer.dtype), layer.factor
        x = x if x.dtype == FP8_DTYPE else rounded(x, layer, cu_seqlens)
    if gelu_for is not None:
        output_format = input_format(gelu_for)  # type: ignore[arg-type]
    return fused_product(
        x,
        layer.weight,
        scale,
        layer.bias if isinstance(bias, str) else bias,
        cu_seqlens,
        output_format,
        gelu_for is not None,
        num_sms(x.device),  # programs, as many as run at once
        counters(x.device),
        uses_tma(x.device),
        x.is_cuda,  # Triton's interpreter runs one program after the other
    )


def silu_and_mul(gate: Tensor, up: Tensor, cu_seqlens: Tensor, reader: nn.Module | None = None) -> Tensor:
    """silu(gate) * up, of [1, T, N], in the input format of the layer behind it."""
    output_format = InputFormat(gate.dtype) if reader is None else input_format(reader)  # type: ignore[arg-type]
    return fused_gated(gate, up, cu_seqlens, output_format, num_sms(gate.device))


def rounded(x: Tensor, layer: FP8Linear, cu_seqlens: Tensor) -> Tensor:
    """x [1, T, C] in FP8. Norms and attention write it by themselves."""
    return fused_gated(x, None, cu_seqlens, layer.input_format, num_sms(x.device))


@functools.cache
def counters(device: torch.device) -> Tensor:
    """One for every tile that programs share. They are made once, before anything is captured, and then only the kernel
    writes them: a replayed CUDA graph must find them as the call before has left them."""
    return torch.zeros(num_sms(device), dtype=torch.int32, device=device)


def uses_tma(device: torch.device) -> bool:
    return dispatch.USE_TMA and dispatch.has_tma(device)
