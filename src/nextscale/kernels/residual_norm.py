"""The sum of a residual stream and the norm that reads it, in one pass.

It is all that happens between two matrix products of a block: the result of the first is gated and added, the sum is
normed and modulated for the second. On the way, tokens that a method chose are taken out of the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.kernels import dispatch
from nextscale.kernels.split_k import SplitKPartials
from nextscale.kernels.triton.residual_norm import fused_sum, fused_sum_and_norm

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed


class Norm(NamedTuple):
    """A norm over channels, times `factor`, plus `term`: each [R, 1, C], [C] or None."""

    eps: float
    factor: Tensor | None = None
    term: Tensor | None = None
    plus_one: bool = False  # times 1 + factor
    rms: bool = False  # the mean is not subtracted

    def apply(self, x: Tensor) -> Tensor:
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
        factor, term = gather_rows(self.factor, chosen), gather_rows(self.term, chosen)
        return Norm(self.eps, factor, term, self.plus_one, self.rms)


def gather_rows(vector: Tensor | None, chosen: Packed | None) -> Tensor | None:
    """The vector [R, 1, C] of each chosen token's row, [1, T, C]."""
    if vector is None or chosen is None or vector.ndim == 1 or len(vector) == 1:
        return vector
    return vector[:, 0][chosen.row.long()][None]


def supports(x: Tensor) -> bool:
    """Whether the kernels take a stream like this."""
    return dispatch.enabled(x) and x.dtype == torch.float32 and x.stride(-1) == 1 and dispatch.inference()


def gated_add(x: Tensor, delta: Tensor | SplitKPartials, gate: Tensor | None, chosen: Packed | None = None) -> Tensor:
    """x + gate * delta, in float32; x and delta of `chosen` tokens are [1, T, C]."""
    if supports(x):
        return fused_sum(x, delta, gate, chosen)
    delta, gate = delta.total() if isinstance(delta, SplitKPartials) else delta, gather_rows(gate, chosen)
    return x + (delta.float() if gate is None else delta * gate)


__all__ = ["Norm", "fused_sum_and_norm", "gated_add", "gather_rows", "supports"]
