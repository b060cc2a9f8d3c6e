"""The sum of a residual stream and the norm that reads it, in one pass.

Everything between two matrix products of a block: what the first one gave is gated and added, the sum is normed and
modulated for the second one. On the way in, tokens that a method chose are taken out of the stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.kernels.parts import Parts

try:
    from nextscale.kernels.modulate_triton import fused_sum, fused_sum_and_norm
except ImportError:  # a CPU build of torch comes without Triton
    fused_sum_and_norm = fused_sum = None  # type: ignore[assignment]


class Norm(NamedTuple):
    """A norm over channels, times `factor`, plus `term`: each [R, 1, C], [C] or None."""

    eps: float
    factor: Tensor | None = None
    term: Tensor | None = None
    plus_one: bool = False  # times 1 + factor
    rms: bool = False  # no mean is taken off

    def __call__(self, x: Tensor) -> Tensor:
        if self.rms:
            y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        elif not self.plus_one:
            return F.layer_norm(x, x.shape[-1:], self.factor, self.term, self.eps)
        else:
            y = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        if self.factor is not None:
            y = y.mul(self.factor.add(1) if self.plus_one else self.factor)
        return y if self.term is None else y.add(self.term)


def fuses(x: Tensor) -> bool:
    """Whether the kernels take a stream like this. torch.compile fuses the plain operations by itself."""
    if fused_sum is None or not x.is_cuda or x.dtype != torch.float32 or x.stride(-1) != 1:
        return False
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def add_to(x: Tensor, delta: Tensor | Parts, gate: Tensor | None) -> Tensor:
    """x + gate * delta, in float32."""
    if fuses(x):
        return fused_sum(x, delta, gate)
    delta = delta.total() if isinstance(delta, Parts) else delta
    return x + (delta.float() if gate is None else delta * gate)
