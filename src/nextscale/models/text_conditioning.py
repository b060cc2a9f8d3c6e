"""Text features as HART and Infinity read them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.io.devices import to_device_async


@dataclass(frozen=True)
class TextCondition:
    """Text features of every image, [length, text_dim] each; `negative` replaces the unconditional rows."""

    text: Sequence[Tensor]
    negative: Sequence[Tensor | None] | None = None  # None: the model's own unconditional text
    padded_lengths: tuple[int, ...] = ()  # prompts are padded to the next of them: few shapes; () = to the longest
    positions: Sequence[Tensor] | None = None  # HART: of every token of `text`, padding included; None = counted

    @property
    def negatives(self) -> Sequence[Tensor | None]:
        """The negative text of every image."""
        return self.negative or [None] * len(self.text)


def left_padded(text: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Features of a prompt, with zeros in front of them, and their positions; padding has position -1."""
    missing = length - len(text)
    positions = torch.cat((torch.full((missing,), -1), torch.arange(len(text))))
    return F.pad(text, (0, 0, missing, 0)), positions


@functools.lru_cache(maxsize=64)  # the same on every call with prompts of these lengths
@torch.inference_mode(False)
def lengths_and_mask(
    counts: tuple[int, ...], length: int, device: torch.device, always: bool
) -> tuple[Tensor, Tensor | None]:
    """Lengths [R] and mask [R, 1, 1, T] of prompts that are padded to `length`.

    Unless there is `always` a mask, it is None if no row is padded.
    """
    lengths = torch.tensor(counts)
    mask = (torch.arange(length) < lengths[:, None])[:, None, None]
    return to_device_async(lengths, device), None if mask.all() and not always else to_device_async(mask, device)
