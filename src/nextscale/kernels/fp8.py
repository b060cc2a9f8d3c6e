"""Linear layers in 8-bit floating point: half the weights to read, twice the arithmetic per second.

Every output channel of the weights and every row of the input has a factor of its own, so that its largest number is
the largest that the format has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

try:
    from nextscale.kernels.fp8_triton import fused_rescale, fused_rounding
except ImportError:  # a CPU build of torch comes without Triton
    fused_rounding = fused_rescale = None  # type: ignore[assignment]

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
OLDEST = (8, 9)  # of the GPUs that multiply it
MULTIPLE = 16  # of the channels, which the GPU asks for


class FP8Linear(nn.Module):
    """Stands in for a linear layer whose weights were rounded."""

    weight: Tensor  # [out, in] in 8 bits
    factor: Tensor  # [out]
    one: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight, factor = round_rows(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("factor", factor)
        self.register_buffer("one", torch.ones_like(factor[0]))
        self.bias = layer.bias

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]; `bias` instead of the layer's own."""
        bias = self.bias if bias is None else bias
        rounded, factor = round_rows(x.reshape(-1, x.shape[-1]))
        if x.is_cuda:
            # Factors of rows and channels are not known to cuBLAS for every shape: they come behind it.
            y = torch._scaled_mm(rounded, self.weight.t(), self.one, self.one, out_dtype=x.dtype, use_fast_accum=True)
        else:
            y = rounded.float() @ self.weight.float().t()
        return rescale(y, factor, self.factor, bias, x.dtype).view(*x.shape[:-1], len(self.weight))


def rescale(y: Tensor, rows: Tensor, channels: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [M, N] times its rows' and its channels' factors, plus the bias."""
    if fused_rescale is not None and y.is_cuda and not torch.compiler.is_compiling():
        return fused_rescale(y, rows, channels, bias)
    y = y.float() * rows[:, None] * channels
    return (y if bias is None else y + bias).to(dtype)


def fits(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not any(n % MULTIPLE for n in layer.weight.shape)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] in 8 bits, and what each row has to be multiplied with, [M] in float32."""
    if fused_rounding is not None and x.is_cuda and not torch.compiler.is_compiling():
        return fused_rounding(x, FORMAT, LARGEST)
    factor = x.abs().amax(1).float().clamp_min(1e-12) / LARGEST
    return (x.float() / factor[:, None]).to(FORMAT), factor
