"""The sum of a residual stream and the norm that reads it, in one pass.

Everything between two matrix products of a block: what the first one gave is gated and added, the sum is normed and
modulated for the second one. On the way in, tokens that a method chose are taken out of the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.kernels.split_k import Parts

try:
    from nextscale.kernels.triton.residual_norm import fused_sum, fused_sum_and_norm
except ImportError:  # a CPU build of torch comes without Triton
    fused_sum_and_norm = fused_sum = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed


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

    def of(self, chosen: Packed | None) -> Norm:
        """The norm of the chosen tokens [1, T, C]."""
        return self._replace(factor=gather_rows(self.factor, chosen), term=gather_rows(self.term, chosen))


def gather_rows(vector: Tensor | None, chosen: Packed | None) -> Tensor | None:
    """What every row has [R, 1, C], of the rows of chosen tokens [1, T, C]."""
    if vector is None or chosen is None or vector.ndim == 1 or len(vector) == 1:
        return vector
    return vector[:, 0][chosen.row.long()][None]


def fuses(x: Tensor) -> bool:
    """Whether the kernels take a stream like this. torch.compile fuses the plain operations by itself."""
    if fused_sum is None or not x.is_cuda or x.dtype != torch.float32 or x.stride(-1) != 1:
        return False
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def add_to(x: Tensor, delta: Tensor | Parts, gate: Tensor | None, chosen: Packed | None = None) -> Tensor:
    """x + gate * delta, in float32; of `chosen` tokens, x and delta are [1, T, C]."""
    if fuses(x):
        return fused_sum(x, delta, gate, chosen)
    delta, gate = delta.total() if isinstance(delta, Parts) else delta, gather_rows(gate, chosen)
    return x + (delta.float() if gate is None else delta * gate)
