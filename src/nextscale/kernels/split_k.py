"""The result of a linear layer whose split-K partials the following residual sum adds up: that costs no extra pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SplitKPartials(NamedTuple):
    partials: Tensor  # [splits, R, K, C], still to be added up
    bias: Tensor | None = None  # [C]

    def total(self) -> Tensor:
        result = self.partials.float().sum(0)
        return result if self.bias is None else result + self.bias
