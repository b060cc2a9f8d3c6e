"""The residual stream of a block: what is added last waits for the norm that reads it, so that both are one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nextscale.kernels.fp8 import FP8Linear, reads
from nextscale.kernels.residual_norm import Norm, add_to, fused_sum_and_norm, fuses
from nextscale.kernels.split_k import Parts

if TYPE_CHECKING:
    from nextscale.methods.selection import Selection


class Stream:
    """Tokens [R, K, C] in float32, or packed ones [1, T, C]."""

    def __init__(self, x: Tensor, chosen: Selection | None = None) -> None:
        """`chosen`: only these tokens of x [R, N, C]."""
        self.chosen = None if chosen is None else chosen.as_packed
        self.x = x if chosen is None or self.chosen is not None else chosen.of(x)
        self.whole = self.chosen is not None  # x has all tokens: the chosen ones are not yet taken out of it
        self.delta: Tensor | Parts | None = None  # not yet added to x, nor multiplied with
        self.gate: Tensor | None = None  # [R, 1, C]

    @property
    def sum(self) -> Tensor:
        """All that was added so far."""
        if self.whole and self.chosen is not None:
            self.x, self.whole = self.chosen.taken(self.x), False
        if self.delta is not None:
            self.x, self.delta = add_to(self.x, self.delta, self.gate, self.chosen), None
        return self.x

    def normed(self, norm: Norm, reader: nn.Linear | FP8Linear) -> Tensor:
        """As this linear layer reads it."""
        if not fuses(self.x):
            dtype = reader.dtype if isinstance(reader, FP8Linear) else reader.weight.dtype
            return norm.of(self.chosen)(self.sum).to(dtype)
        self.x, normed = fused_sum_and_norm(self.x, self.chosen, self.whole, self.delta, self.gate, norm, reads(reader))
        self.whole, self.delta = False, None
        return normed

    def add(self, delta: Tensor | Parts, gate: Tensor | None = None) -> None:
        """gate * delta, of all tokens of the stream."""
        self.x, self.delta, self.gate = self.sum, delta, gate
