"""Which rows run: guidance branches of the images of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows that run a scale: a conditional one per image, then the unconditional ones."""

    image_ids: tuple[int, ...]  # images of the call, one per conditional row
    unconditional: tuple[int, ...]  # images that have an unconditional row

    @property
    def images(self) -> int:
        return len(self.image_ids)

    @property
    def all(self) -> tuple[int, ...]:
        """The image of every row."""
        return self.image_ids + self.unconditional

    @property
    def guided(self) -> Tensor | None:
        """Indices of the guided images among the conditional rows; None = all or none of them."""
        if not self.unconditional or self.unconditional == self.image_ids:
            return None
        return torch.tensor([self.image_ids.index(i) for i in self.unconditional])

    def expand_to_rows(self, x: Tensor) -> Tensor:
        """Expand one entry per image to one per row."""
        if not self.unconditional:
            return x
        return torch.cat((x, x if self.guided is None else x[self.guided.to(x.device)]))


def row_indices(some: Rows, among: Rows) -> Tensor:
    """Find the row numbers of `some` within `among`."""
    conditional = [among.image_ids.index(i) for i in some.image_ids]
    unconditional = [len(among.image_ids) + among.unconditional.index(i) for i in some.unconditional]
    return torch.tensor(conditional + unconditional, dtype=torch.long)
