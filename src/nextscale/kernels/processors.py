"""How much of a GPU there is to fill."""

from __future__ import annotations

import functools

import torch


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU; Triton's interpreter works alone."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
