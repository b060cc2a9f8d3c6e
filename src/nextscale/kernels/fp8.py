"""Linear layers in 8-bit floating point: half the weights to read, twice the arithmetic per second.

Every output channel of the weights and every row of the input has a factor of its own, so that its largest number is
the largest that the format has. What comes before such a layer can write 8 bits itself, and what comes behind can
multiply with the factors itself; so few passes are left that only round.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels.parts import Parts

try:
    from nextscale.kernels.fp8_triton import fused_gelu, fused_rescale, fused_rounding
except ImportError:  # a CPU build of torch comes without Triton
    fused_rounding = fused_rescale = fused_gelu = None  # type: ignore[assignment]

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
OLDEST = (8, 9)  # of the GPUs that multiply it
MULTIPLE = 16  # of the channels, which the GPU asks for
MANY = 1024  # rows from which on it is faster to let cuBLAS take the factors than to make a pass for them,
MANY_MORE = 6144  # and than to leave them to a pass that has to be made anyway
SHRUNK = 2.0**-16  # what products are multiplied with that still lack their factors: float16 does not go far


class Rounded(NamedTuple):
    """Rows in 8 bits."""

    x: Tensor  # [..., K]
    factor: Tensor  # [...] in float32: what each of them has to be multiplied with


class FP8Linear(nn.Module):
    """Stands in for a linear layer whose weights were rounded."""

    weight: Tensor  # [out, in] in 8 bits
    factor: Tensor  # [out]
    late_factor: Tensor  # [out], of shrunk products
    shrunk: Tensor  # for either side

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight, factor = round_rows(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("factor", factor)
        self.register_buffer("late_factor", factor / SHRUNK)
        self.register_buffer("shrunk", torch.full_like(factor[0], SHRUNK**0.5))
        self.bias = layer.bias
        self.dtype = layer.weight.dtype  # of what it gives

    def forward(self, x: Tensor | Rounded, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]; `bias` instead of the layer's own."""
        return self.finished(self.product(x, bias, MANY))

    def product(self, x: Tensor | Rounded, bias: Tensor | None = None, many: int = MANY_MORE) -> Parts:
        """The same without factors and bias, unless there are many rows."""
        bias = self.bias if bias is None else bias
        x, rows = x if isinstance(x, Rounded) else round_rows(x)
        flat, shape = x.reshape(-1, x.shape[-1]), (1, *x.shape[:-1], len(self.weight))
        if not x.is_cuda:
            return Parts((flat.float() @ self.weight.float().t()).view(shape), bias, rows, self.factor)
        if len(flat) >= many and takes_factors(x.device):
            factors = rows.reshape(-1, 1), self.factor[None]
            y = torch._scaled_mm(flat, self.weight.t(), *factors, bias=bias, out_dtype=self.dtype, use_fast_accum=True)
            return Parts(y.view(shape))
        factors = self.shrunk, self.shrunk
        y = torch._scaled_mm(flat, self.weight.t(), *factors, out_dtype=self.dtype, use_fast_accum=True)
        return Parts(y.view(shape), bias, rows, self.late_factor)

    def finished(self, found: Parts) -> Tensor:
        y = found.sums[0]
        if found.by_row is None:
            return y
        if fused_rescale is not None and y.is_cuda and not torch.compiler.is_compiling():
            return fused_rescale(y, found)
        return found.total().to(self.dtype)

    def gelu(self, x: Tensor | Rounded) -> Tensor | Rounded:
        """GELU of what the layer gives, for another one in 8 bits."""
        found = self.product(x, many=2 * MANY)
        if fused_gelu is not None and found.sums.is_cuda and not torch.compiler.is_compiling():
            return Rounded(*fused_gelu(found, FORMAT, LARGEST))
        return F.gelu(self.finished(found), approximate="tanh")


def takes_factors(device: torch.device) -> bool:
    """Whether cuBLAS multiplies with factors of rows and channels there."""
    return not torch.compiler.is_compiling() and _capability(device) == (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def fits(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not any(n % MULTIPLE for n in layer.weight.shape)


def round_rows(x: Tensor) -> Rounded:
    """x [..., K] in 8 bits."""
    if fused_rounding is not None and x.is_cuda and not torch.compiler.is_compiling():
        return Rounded(*fused_rounding(x, FORMAT, LARGEST))
    factor = x.abs().amax(-1).float().clamp_min(1e-12) / LARGEST
    return Rounded((x.float() / factor[..., None]).to(FORMAT), factor)
