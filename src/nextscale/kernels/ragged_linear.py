"""Linear layers for packed tokens: x [1, T, C] has room for T, and only the device knows how many there are.

cuBLAS would multiply all the room. Here every program reads the number of tokens first, takes what is its share, and
leaves the room behind them alone.
"""

from __future__ import annotations

import functools
import os
from typing import Literal

import torch
from torch import Tensor, nn

from nextscale.kernels.fp8 import FORMAT, FP8Linear, Reads, reads
from nextscale.kernels.num_sms import processors

try:
    from nextscale.kernels.triton.ragged_linear import fused_gated, fused_product
except ImportError:  # a CPU build of torch comes without Triton
    fused_gated = fused_product = None  # type: ignore[assignment]

MULTIPLE, MULTIPLE_IN_FP8 = 64, 128  # of the channels
OLDEST = (9, 0)  # of the GPUs that fetch tiles by themselves
TMA = os.environ.get("NEXTSCALE_KERNELS_TMA") != "off"  # whether they are asked to


def multiplies(x: Tensor, layer: nn.Module) -> bool:
    """Whether the kernel takes these."""
    if fused_product is None or not x.is_cuda or not isinstance(layer, (nn.Linear, FP8Linear)):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    small = isinstance(layer, FP8Linear)
    if x.dtype not in (torch.bfloat16, torch.float16, FORMAT) or not (small or x.dtype == layer.weight.dtype != FORMAT):
        return False
    out, into = layer.weight.shape
    return out % MULTIPLE == 0 and into % (MULTIPLE_IN_FP8 if small else MULTIPLE) == 0


def ragged_linear(
    x: Tensor,
    layer: nn.Linear | FP8Linear,
    start: Tensor,
    bias: Tensor | Literal["own"] | None = "own",
    gelu_for: nn.Module | None = None,
) -> Tensor:
    """Of x [1, T, K], of which the first start[-1] tokens are real -> [1, T, N]; what is behind them, nobody may read.

    `bias`: instead of the layer's own. `gelu_for`: GELU by its tanh formula follows, and it is written as that layer
    reads it. Where `multiplies` says so, and in one stream at a time, for calls share the counters of a device.
    """
    into = Reads(layer.weight.dtype)
    by = 1.0
    if isinstance(layer, FP8Linear):
        into, by = Reads(layer.dtype), layer.factor
        x = x if x.dtype == FORMAT else ragged_rounded(x, layer, start)
    if gelu_for is not None:
        into = reads(gelu_for)  # type: ignore[arg-type]
    return fused_product(
        x,
        layer.weight,
        by,
        layer.bias if isinstance(bias, str) else bias,
        start,
        into,
        gelu_for is not None,
        processors(x.device),  # programs, as many as run at once
        counters(x.device),
        uses_tma(x.device),
        x.is_cuda,  # Triton's interpreter runs one program after the other
    )


def ragged_gated(gate: Tensor, up: Tensor, start: Tensor, reader: nn.Module | None = None) -> Tensor:
    """silu(gate) * up, of [1, T, N], for the layer behind it."""
    into = Reads(gate.dtype) if reader is None else reads(reader)  # type: ignore[arg-type]
    return fused_gated(gate, up, start, into, processors(gate.device))


def ragged_rounded(x: Tensor, layer: FP8Linear, start: Tensor) -> Tensor:
    """x [1, T, C] in 8 bits. Norms and attention write them by themselves."""
    return fused_gated(x, None, start, layer.reads, processors(x.device))


@functools.cache
def counters(device: torch.device) -> Tensor:
    """One for every tile that programs share. They are made once, before anything is captured, and then only the kernel
    writes them: a CUDA graph must find them whenever it is replayed as the call before has left them."""
    return torch.zeros(processors(device), dtype=torch.int32, device=device)


@functools.cache
def uses_tma(device: torch.device) -> bool:
    return TMA and torch.cuda.get_device_capability(device) >= OLDEST
