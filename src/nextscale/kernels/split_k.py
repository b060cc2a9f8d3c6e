"""What a linear layer has computed when the rest can be left to whoever adds it to a residual stream: that is no extra
pass, for the sum with the stream is waiting anyway."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Parts(NamedTuple):
    sums: Tensor  # [parts, R, K, C], still to be added up
    bias: Tensor | None = None  # [C]

    def total(self) -> Tensor:
        result = self.sums.float().sum(0)
        return result if self.bias is None else result + self.bias
