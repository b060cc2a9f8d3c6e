"""The residual stream of a block: what is added last waits for the norm that reads it, so that both are one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nextscale.kernels import residual_norm
from nextscale.kernels.fp8 import FP8Linear, input_format
from nextscale.kernels.residual_norm import Norm
from nextscale.kernels.split_k import SplitKPartials

if TYPE_CHECKING:
    from nextscale.methods.selection import Selection


class ResidualStream:
    """Tokens [R, K, C] in float32, or packed ones [1, T, C]."""

    def __init__(self, x: Tensor, chosen: Selection | None = None) -> None:
        """A stream of x [R, N, C], or of its `chosen` tokens alone."""
        self.packed = None if chosen is None else chosen.as_packed
        self.x = x if chosen is None or self.packed is not None else chosen.of(x)
        self.needs_gather = self.packed is not None  # x still has all tokens
        self.delta: Tensor | SplitKPartials | None = None  # not yet added to x, nor multiplied with
        self.gate: Tensor | None = None  # [R, 1, C]

    @property
    def sum(self) -> Tensor:
        """The stream with all that was added so far."""
        if self.needs_gather and self.packed is not None:
            self.x, self.needs_gather = self.packed.taken(self.x), False
        if self.delta is not None:
            self.x, self.delta = residual_norm.gated_add(self.x, self.delta, self.gate, self.packed), None
        return self.x

    def normed(self, norm: Norm, reader: nn.Linear | FP8Linear) -> Tensor:
        """The normalized sum, as this linear layer reads it."""
        if not residual_norm.supports(self.x):
            dtype = reader.dtype if isinstance(reader, FP8Linear) else reader.weight.dtype
            return norm.of(self.packed).apply(self.sum).to(dtype)
        pending = self.packed, self.needs_gather, self.delta, self.gate
        self.x, normed = residual_norm.fused_sum_and_norm(self.x, *pending, norm, input_format(reader))
        self.needs_gather, self.delta = False, None
        return normed

    def add(self, delta: Tensor | SplitKPartials, gate: Tensor | None = None) -> None:
        """Add gate * delta to all tokens of the stream."""
        self.x, self.delta, self.gate = self.sum, delta, gate
