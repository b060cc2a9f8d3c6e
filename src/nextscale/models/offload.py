"""Modules that rest in the host's memory while nobody asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOCK = threading.Lock()  # what one call has fetched, another must not put away


@torch.inference_mode(False)
def set_aside(module: Any) -> None:
    """Into the host's memory; `module` is whatever has a `to`."""
    module.to("cpu")


@contextmanager
def fetched(module: Any, device: torch.device) -> Iterator[None]:
    """On a device for a moment, and back in the host's memory afterwards, come what may."""
    with _LOCK:
        try:
            with torch.inference_mode(False):
                module.to(device)
            yield
        finally:
            set_aside(module)
            if device.type == "cuda":  # torch would keep it, and a graph's memory comes from elsewhere
                torch.cuda.empty_cache()
