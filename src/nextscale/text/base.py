"""The interface of text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class TextEncoder(Protocol):
    """An encoder of prompts. One that cannot encode every text may also have `check(prompt)`, which raises a
    `NextscaleError` for such a text: long lists of prompts are then checked before the first image."""

    @property
    def nbytes(self) -> int: ...

    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Features of every prompt, [length, dim] each."""
        ...

    def to(self, device: torch.device | str) -> None: ...


# Parameter counts of the encoders of published models, for those that are not loaded yet.
KNOWN_PARAMETERS = {"flan-t5-xl": 1_223_527_424, "Qwen2-VL-1.5B-Instruct": 1_543_714_304}


def encoder_nbytes(encoder: TextEncoder, device: torch.device) -> int:
    """Memory of an encoder's weights: those that are loaded or, before that, those that will be for a device."""
    if encoder.nbytes or not hasattr(encoder, "dtype_on"):
        return encoder.nbytes
    return KNOWN_PARAMETERS.get(Path(encoder.source).name, 0) * encoder.dtype_on(device).itemsize  # type: ignore[attr-defined]
