"""Calls that are timed one by one, and their statistics. On a CPU nothing is waited for and no memory counted."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nextscale.pipeline import Pipeline


@dataclass(frozen=True)
class Timed:
    seconds: float
    share: float  # of a plain run's tokens that were computed, the mean of the call's images
    flops: int  # of all its images

    @property
    def reduced(self) -> bool:
        return self.share < 1


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give back memory that nobody uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reserved_bytes(device: torch.device) -> int:
    """Count the bytes that torch reserves of the device, after giving back what nobody uses."""
    empty_cache(device)
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def timed(pipe: Pipeline, **call: Any) -> Timed:
    synchronize(pipe.device)
    began = time.perf_counter()
    made = pipe(**call)
    synchronize(pipe.device)
    seconds = time.perf_counter() - began
    images = made.trace.to_dict()["images"]  # read when the clock has stopped, for it asks the device
    shares = [image["row_tokens_computed"] / image["row_tokens_full"] for image in images]
    return Timed(seconds, statistics.mean(shares), sum(image["flops"] for image in images))


def p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def times(calls: Sequence[Timed]) -> dict[str, float]:
    """Count calls and take their milliseconds; empty without calls."""
    seconds = [call.seconds for call in calls]
    if not seconds:
        return {}
    return {
        "calls": len(seconds),
        "ms": 1e3 * statistics.median(seconds),
        "mean_ms": 1e3 * statistics.mean(seconds),
        "p95_ms": 1e3 * p95(seconds),
    }


def summary(calls: Sequence[Timed]) -> dict[str, Any]:
    """Summarize all calls, those that a method reduced, and those it left alone, which take as long as plain ones."""
    shares = [call.share for call in calls]
    return {
        **times(calls),
        "tokens": statistics.median(shares),
        "mean_tokens": statistics.mean(shares),
        "reduced": times([call for call in calls if call.reduced]),
        "not_reduced": times([call for call in calls if not call.reduced]),
    }


def format_times(found: dict[str, float]) -> str:
    """Put what `times` found into words."""
    return f"{found['calls']} calls, {found['ms']:.1f} ms, mean {found['mean_ms']:.1f}, p95 {found['p95_ms']:.1f}"
