"""How many programs a kernel gets whose work is counted on the device: few, and each takes one item after another."""

from __future__ import annotations

import functools

import torch

PROGRAMS_PER_SM = 8  # that run at once


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; elsewhere, as many as a large one has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def num_programs(device: torch.device, max_items: int) -> int:
    return max(min(max_items, PROGRAMS_PER_SM * num_sms(device)), 1)
