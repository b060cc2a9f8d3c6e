"""What a text encoder is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class TextEncoder(Protocol):
    @property
    def nbytes(self) -> int: ...

    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Features of every prompt, [length, dim] each."""
        ...

    def to(self, device: torch.device | str) -> None: ...
