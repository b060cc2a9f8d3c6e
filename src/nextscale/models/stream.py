"""The residual stream of a block: what is added last waits for the norm that reads it, so that both are one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nextscale.kernels.fp8 import FP8Linear, reads
from nextscale.kernels.modulate import Norm, add_to, fused_sum_and_norm, fuses
from nextscale.kernels.parts import Parts

if TYPE_CHECKING:
    from nextscale.methods.selection import Selection


class Stream:
    """Tokens [R, K, C] in float32."""

    def __init__(self, x: Tensor, chosen: Selection | None = None) -> None:
        """`chosen`: only these tokens of x [R, N, C]."""
        self.x = x
        self.chosen = chosen  # not yet taken out of x
        self.delta: Tensor | Parts | None = None  # not yet added to x, nor multiplied with
        self.gate: Tensor | None = None  # [R, 1, C]

    @property
    def sum(self) -> Tensor:
        """All that was added so far."""
        if self.chosen is not None:
            self.x, self.chosen = self.chosen.of(self.x), None
        if self.delta is not None:
            self.x, self.delta = add_to(self.x, self.delta, self.gate), None
        return self.x

    def normed(self, norm: Norm, reader: nn.Linear | FP8Linear) -> Tensor:
        """As this linear layer reads it."""
        if not fuses(self.x):
            return norm(self.sum).to(reader.dtype if isinstance(reader, FP8Linear) else reader.weight.dtype)
        index = None if self.chosen is None else self.chosen.index
        self.x, normed = fused_sum_and_norm(self.x, index, self.delta, self.gate, norm, reads(reader))
        self.chosen = self.delta = None
        return normed

    def add(self, delta: Tensor | Parts, gate: Tensor | None = None) -> None:
        """gate * delta [R, K, C]."""
        self.x, self.delta, self.gate = self.sum, delta, gate
