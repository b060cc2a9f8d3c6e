"""Calls that are timed one by one, and what is said of them. On a CPU nothing is waited for and nothing is held."""

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
    share: float  # of a plain run's tokens that were computed, the mean of the call's pictures
    flops: int  # of all its pictures

    @property
    def reduced(self) -> bool:
        return self.share < 1


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty(device: torch.device) -> None:
    """Let go of what nobody uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held(device: torch.device) -> int:
    """Bytes that torch holds of the device, what nobody uses let go."""
    empty(device)
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def timed(pipe: Pipeline, **call: Any) -> Timed:
    wait(pipe.device)
    began = time.perf_counter()
    made = pipe(**call)
    wait(pipe.device)
    seconds = time.perf_counter() - began
    images = made.trace.to_dict()["images"]  # read when the clock has stopped, for it asks the device
    shares = [image["row_tokens_computed"] / image["row_tokens_full"] for image in images]
    return Timed(seconds, statistics.mean(shares), sum(image["flops"] for image in images))


def p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def times(calls: Sequence[Timed]) -> dict[str, float]:
    """How many, and milliseconds; empty without calls."""
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
    """Of all, and apart of those that a method reduced and those it left alone, which take as long as plain ones."""
    shares = [call.share for call in calls]
    return {
        **times(calls),
        "tokens": statistics.median(shares),
        "mean_tokens": statistics.mean(shares),
        "reduced": times([call for call in calls if call.reduced]),
        "not_reduced": times([call for call in calls if not call.reduced]),
    }


def shown(found: dict[str, float]) -> str:
    """What `times` found, in words."""
    return f"{found['calls']} calls, {found['ms']:.1f} ms, mean {found['mean_ms']:.1f}, p95 {found['p95_ms']:.1f}"
