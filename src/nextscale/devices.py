"""Dtypes and devices as users spell them."""

from __future__ import annotations

import os

import torch

from nextscale.errors import NextscaleError, choices

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise NextscaleError(f"dtype {str(dtype)!r} is not supported; allowed: {choices(DTYPES)}")
    return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_device(device: torch.device | str) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise NextscaleError(f"unknown device {device!r}; allowed: cpu, cuda, cuda:1, mps, ...") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise NextscaleError("device 'cuda' was asked for, but this torch sees no CUDA device; allowed here: cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise NextscaleError(f"device {str(chosen)!r} was asked for, but there are only {torch.cuda.device_count()}")
    return chosen


def memory_of(device: torch.device) -> int | None:
    """Bytes that the device has in all; None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def wait_for(device: torch.device) -> None:
    """Until the device has done all that was asked of it, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
