"""What a text encoder is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class TextEncoder(Protocol):
    """One that cannot encode every text may also have `check(prompt)`, which raises a `NextscaleError` for such a text
    and costs next to nothing: long lists of prompts are then checked before the first picture."""

    @property
    def nbytes(self) -> int: ...

    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Features of every prompt, [length, dim] each."""
        ...

    def to(self, device: torch.device | str) -> None: ...
