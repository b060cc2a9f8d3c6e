"""Linear layers and convolutions in 8-bit floating point: half the weights to read, twice the arithmetic per second.

Such a number has three bits behind its first one, whatever its size is, from 2^-6 to 448. What it costs is these bits;
where in that range the numbers lie hardly matters. So one factor, a power of two, is enough for all weights of a layer,
and another for all that enters it, which the weights tell beforehand (`models/quantize.py`). Then nobody has to see a
whole row before it can be rounded: what comes before such a layer writes 8 bits itself, and cuBLAS takes the factors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from nextscale.kernels.triton.fp8 import fused_cast
except ImportError:  # a CPU build of torch comes without Triton
    fused_cast = None  # type: ignore[assignment]

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
OLDEST = (8, 9)  # of the GPUs that multiply it
MULTIPLE = 16  # of the channels, which the GPU asks for
# Inputs of the usual size come to lie between half of it and this: at least 112 times as much can be told, and down to
# a 128th with all bits.
PLACE = 4.0


class Reads(NamedTuple):
    """How a layer wants its input."""

    dtype: torch.dtype
    by: float = 1.0  # what it has to be multiplied with


class FP8Layer(nn.Module):
    """Stands in for a layer whose weights were rounded."""

    weight: Tensor  # in 8 bits
    into: Tensor  # what inputs are multiplied with
    out: Tensor  # and their products with the weights
    one: Tensor

    def __init__(self, layer: nn.Linear | nn.Conv2d, usual: float = 1.0) -> None:
        """`usual`: root mean square of what enters it, within a factor of 16."""
        super().__init__()
        weight = layer.weight.detach().float()
        by = power_of_two(LARGEST, weight.abs().max().item())
        self.reads = Reads(FORMAT, power_of_two(PLACE, usual))
        self.factor = 1 / (by * self.reads.by)
        self.register_buffer("weight", (weight * by).to(FORMAT))
        for name, value in (("into", self.reads.by), ("out", self.factor), ("one", 1.0)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32, device=weight.device))
        self.bias = layer.bias
        self.dtype = layer.weight.dtype  # of what it gives

    def rounded(self, x: Tensor) -> Tensor:
        if x.dtype == FORMAT:
            return x
        if casts(x):
            return fused_cast(x, self.reads)
        return (x.float() * self.into).clamp(-LARGEST, LARGEST).to(FORMAT)


class FP8Linear(FP8Layer):
    """Its weights are [out, in]."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], in 8 bits or not -> [..., out]; `bias` instead of the layer's own."""
        return self.product(x, self.bias if bias is None else bias)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat, shape = self.rounded(x).reshape(-1, x.shape[-1]), (*x.shape[:-1], len(self.weight))
        if x.is_cuda:
            factors = self.out, self.one
            y = torch._scaled_mm(flat, self.weight.t(), *factors, bias=bias, out_dtype=self.dtype, use_fast_accum=True)
        else:
            y = flat.float() @ self.weight.float().t() * self.out
            y = (y if bias is None else y + bias).to(self.dtype)
        return y.view(shape)


class FP8Conv(FP8Layer):
    """A convolution of 3 x 3 cells. Here the arithmetic is imitated; `kernels/conv.py` does it for maps with channels
    last. Its weights are [out, in, 3, 3], channels last."""

    def __init__(self, layer: nn.Conv2d, usual: float = 1.0) -> None:
        super().__init__(layer, usual)
        self.weight = self.weight.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias[:, None, None]

    def product(self, x: Tensor) -> Tensor:
        """x [B, in, H, W], in 8 bits or not -> [B, out, H, W] without the bias."""
        x = self.rounded(x).to(self.dtype) / self.into.to(self.dtype)  # not behind the sum: float16 does not go far
        return F.conv2d(x, self.weight.to(self.dtype) * (self.into * self.out).to(self.dtype), padding=1)


def reads(layer: nn.Linear | nn.Conv2d | FP8Layer) -> Reads:
    return layer.reads if isinstance(layer, FP8Layer) else Reads(layer.weight.dtype)


def gelu(x: Tensor, reader: nn.Module) -> Tensor:
    """GELU by its tanh formula, as a layer reads it."""
    if isinstance(reader, FP8Linear) and casts(x):
        return fused_cast(x, reader.reads, gelu=True)
    return F.gelu(x, approximate="tanh")


def casts(x: Tensor) -> bool:
    """torch.compile fuses the plain operations by itself."""
    return fused_cast is not None and x.is_cuda and not torch.compiler.is_compiling()


def power_of_two(wanted: float, size: float) -> float:
    """The largest one that takes a number of this size to at most what is wanted. Sizes that are no number give some
    factor, and the logits will tell."""
    return 2.0 ** (math.frexp(wanted / max(size, 1e-12))[1] - 1)


def fits(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not any(n % MULTIPLE for n in layer.weight.shape)
