"""How many programs a kernel needs whose work is counted on the device: few, and each takes one piece after another."""

from __future__ import annotations

import functools

import torch

EACH = 8  # programs that a processor runs at once


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU; elsewhere, as many as a large one has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def programs(device: torch.device, most: int) -> int:
    """For so many pieces at most."""
    return max(min(most, EACH * processors(device)), 1)
