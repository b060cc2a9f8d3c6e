"""What a text encoder is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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


# Parameters of the encoders that published models name, for those that are not loaded yet.
KNOWN = {"flan-t5-xl": 1_223_527_424, "Qwen2-VL-1.5B-Instruct": 1_543_714_304}


def nbytes_of(encoder: TextEncoder, device: torch.device) -> int:
    """Memory of its weights: of those that are loaded or, before that, of those that will be for a device."""
    if encoder.nbytes or not hasattr(encoder, "dtype_on"):
        return encoder.nbytes
    return KNOWN.get(Path(encoder.source).name, 0) * encoder.dtype_on(device).itemsize  # type: ignore[attr-defined]
