"""Dtypes and devices as users spell them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from nextscale.errors import NextscaleError, choices
from nextscale.io.arguments import short_repr

F = TypeVar("F", bound=Callable[..., Any])
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = DTYPES.get(str(dtype).removeprefix("torch.")) if isinstance(dtype, (str, torch.dtype)) else None
    if found is None:
        named = str(dtype) if isinstance(dtype, torch.dtype) else dtype
        raise NextscaleError(f"dtype {short_repr(named)} is not supported; allowed: {choices(DTYPES)}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_device(device: torch.device | str) -> torch.device:
    try:
        known = isinstance(device, (str, torch.device)) or (isinstance(device, int) and not isinstance(device, bool))
        chosen = torch.device(device) if known else None
    except (RuntimeError, ValueError, OverflowError):
        chosen = None
    if chosen is None:
        raise NextscaleError(f"unknown device {short_repr(device)}; allowed: cpu, cuda, cuda:1, mps, ...")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise NextscaleError("device 'cuda' was asked for, but this torch sees no CUDA device; allowed here: cpu")
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise NextscaleError(f"device {str(chosen)!r} was asked for, but this torch cannot use it") from None
    if chosen.type == "meta":
        raise NextscaleError("the device 'meta' holds no numbers; allowed: cpu, cuda, mps, ...")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise NextscaleError(f"device {str(chosen)!r} was asked for, but there are only {torch.cuda.device_count()}")
    return chosen


@functools.cache
def total_memory(device: torch.device) -> int | None:
    """Bytes that the device has in all; None where that is unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_container_limits()])
    return None


def _container_limits() -> list[int]:
    """What a container, or another control group of Linux, may take of the host's memory."""
    found = []
    for path in CGROUP_LIMITS:
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return found


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Leave any autocast of the caller: dtypes are our own business, and logits must stay float32."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def full_precision(function: F) -> F:
    """Run `function(request, model, ...)` outside any autocast of the caller."""

    @functools.wraps(function)
    def wrapped(request: Any, model: Any, *args: Any) -> Any:
        with without_autocast(model.device):
            return function(request, model, *args)

    return wrapped  # type: ignore[return-value]


def to_device_async(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class Clock:
    """Times at which a device had done its work, taken at some moments of a call without waiting for it.

    It is kept from call to call: to make an event may take as long as ten kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moments: dict[str, Any] = {}  # seconds, or CUDA events

    def mark(self, moment: str) -> None:
        if self.device.type != "cuda":
            self.moments[moment] = time.perf_counter()
            return
        if moment not in self.moments:
            self.moments[moment] = torch.cuda.Event(enable_timing=True)
        self.moments[moment].record(torch.cuda.current_stream(self.device))

    def between(self, earlier: str, later: str) -> float:
        """Wait for the later moment; return the seconds."""
        a, b = self.moments[earlier], self.moments[later]
        if self.device.type != "cuda":
            return b - a
        b.synchronize()
        return a.elapsed_time(b) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lost_device(device: torch.device) -> Exception | None:
    """Why a GPU can do nothing more, as after an illegal access; None if it can."""
    try:
        synchronize(device)
    except RuntimeError as error:
        return error
    return None
