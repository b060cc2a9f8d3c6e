"""Modules that stay in the host's memory while nobody needs them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOCK = threading.Lock()  # what one call has onloaded, another must not move back


@torch.inference_mode(False)
def to_host(module: Any) -> None:
    """Move a module, or whatever has a `to`, into the host's memory."""
    module.to("cpu")


@contextmanager
def onload(module: Any, device: torch.device) -> Iterator[None]:
    """Keep a module on a device for a moment, and move it back to the host's memory, come what may."""
    with _LOCK:
        try:
            with torch.inference_mode(False):
                module.to(device)
            yield
        finally:
            to_host(module)
            if device.type == "cuda":  # torch would keep it, and a graph's memory comes from elsewhere
                torch.cuda.empty_cache()
