"""Linear layers and convolutions in FP8 (e4m3): half the weights to read, twice the arithmetic per second.

Such a number has three bits behind its first one, whatever its size is, from 2^-6 to 448. These bits are what it costs;
where in that range the numbers lie hardly matters. So one scale, a power of two, is enough for all weights of a layer,
and another for its input, which follows from the weights (`models/fp8.py`). No row has to be seen as a whole before it
can be rounded: the operation in front of such a layer writes FP8 itself, and cuBLAS takes the scales.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels import dispatch
from nextscale.kernels.triton.fp8 import fused_cast

FP8_DTYPE = torch.float8_e4m3fn
MAX_FP8 = torch.finfo(FP8_DTYPE).max
MIN_CAPABILITY = (8, 9)  # Ada
CHANNEL_MULTIPLE = 16  # which the GPU asks for
# Inputs of the usual size come to lie between half of it and this: 112 times as much still fits, and a 128th still has
# all bits.
TARGET_SIZE = 4.0


class InputFormat(NamedTuple):
    """The format in which a layer reads its input."""

    dtype: torch.dtype
    scale: float = 1.0  # to multiply the input by


class FP8Layer(nn.Module):
    """Replace a layer, with rounded weights."""

    weight: Tensor  # in FP8
    input_scale: Tensor
    output_scale: Tensor  # of products with the weights
    one: Tensor

    def __init__(self, layer: nn.Linear | nn.Conv2d, usual: float = 1.0) -> None:
        """`usual`: root mean square of the input, within a factor of 16."""
        super().__init__()
        weight = layer.weight.detach().float()
        weight_scale = power_of_two(MAX_FP8, weight.abs().max().item())
        self.input_format = InputFormat(FP8_DTYPE, power_of_two(TARGET_SIZE, usual))
        self.factor = 1 / (weight_scale * self.input_format.scale)
        self.register_buffer("weight", (weight * weight_scale).to(FP8_DTYPE))
        scales = ("input_scale", self.input_format.scale), ("output_scale", self.factor), ("one", 1.0)
        for name, value in scales:
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32, device=weight.device))
        self.bias = layer.bias
        self.dtype = layer.weight.dtype  # of its output

    def rounded(self, x: Tensor) -> Tensor:
        if x.dtype == FP8_DTYPE:
            return x
        if supports(x):
            return fused_cast(x, self.input_format)
        return (x.float() * self.input_scale).clamp(-MAX_FP8, MAX_FP8).to(FP8_DTYPE)


class FP8Linear(FP8Layer):
    """Its weights are [out, in]."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], in FP8 or not -> [..., out]; `bias` replaces the layer's own."""
        return self.product(x, self.bias if bias is None else bias)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat, shape = self.rounded(x).reshape(-1, x.shape[-1]), (*x.shape[:-1], len(self.weight))
        if x.is_cuda:
            scales = self.output_scale, self.one
            y = torch._scaled_mm(flat, self.weight.t(), *scales, bias=bias, out_dtype=self.dtype, use_fast_accum=True)
        else:
            y = flat.float() @ self.weight.float().t() * self.output_scale
            y = (y if bias is None else y + bias).to(self.dtype)
        return y.view(shape)


class FP8Conv(FP8Layer):
    """A 3 x 3 convolution with weights [out, in, 3, 3], channels last. Here its arithmetic is imitated;
    `kernels/conv.py` does it."""

    def __init__(self, layer: nn.Conv2d, usual: float = 1.0) -> None:
        super().__init__(layer, usual)
        self.weight = self.weight.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias[:, None, None]

    def product(self, x: Tensor) -> Tensor:
        """x [B, in, H, W], in FP8 or not -> [B, out, H, W] without the bias."""
        scale = self.input_scale.to(self.dtype)
        x = self.rounded(x).to(self.dtype) / scale  # not behind the sum: float16 overflows
        weight = self.weight.to(self.dtype) * (self.input_scale * self.output_scale).to(self.dtype)
        return F.conv2d(x, weight, padding=1)


def input_format(layer: nn.Linear | nn.Conv2d | FP8Layer) -> InputFormat:
    return layer.input_format if isinstance(layer, FP8Layer) else InputFormat(layer.weight.dtype)


def gelu(x: Tensor, reader: nn.Module) -> Tensor:
    """GELU by its tanh formula, in the input format of the layer behind it."""
    if isinstance(reader, FP8Linear) and supports(x):
        return fused_cast(x, reader.input_format, gelu=True)
    return F.gelu(x, approximate="tanh")


def supports(x: Tensor) -> bool:
    """Whether the kernel rounds x. torch.compile fuses the plain operations by itself."""
    return dispatch.enabled(x) and not torch.compiler.is_compiling()


def power_of_two(target: float, size: float) -> float:
    """The largest one that keeps a number of this size below the target. A size that is not finite gives some factor:
    the check of the logits reports it."""
    return 2.0 ** (math.frexp(target / max(size, 1e-12))[1] - 1)


def is_roundable(layer: nn.Module) -> bool:
    """Whether an `FP8Linear` may replace this layer."""
    return isinstance(layer, nn.Linear) and not any(n % CHANNEL_MULTIPLE for n in layer.weight.shape)
