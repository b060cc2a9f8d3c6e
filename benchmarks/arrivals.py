"""Arrivals at random moments, played against a server: what latency at which rate. For cluster.py and scale.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from serving import ACCEPTED, PROMPTS, Answer, send

STEP = 1.15  # from one rate to the next, where those that were asked for are not enough
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class Point:
    """What came of one run."""

    rate: float  # requests a second that arrived
    p95: float  # seconds; infinite if one was not answered
    refused: int = 0
    generator: float = 0.0  # its share of a core


def poisson(requests: int, seed: int = 1) -> list[float]:
    """Moments of arrivals, one a second in the mean; the same for every rate and every number of replicas."""
    draw = random.Random(seed)
    return list(itertools.accumulate(draw.expovariate(1.0) for _ in range(requests)))


def read_trace(path: Path) -> list[float]:
    """Moments from a file with a number of seconds per line."""
    moments = sorted(float(line) for line in path.read_text().split())
    return [moment - moments[0] for moment in moments]


def at_rate(moments: Sequence[float], rate: float) -> list[float]:
    """The same trace, faster or slower."""
    return [moment * len(moments) / moments[-1] / rate for moment in moments]


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def sustained(points: Sequence[Point], target: float) -> float:
    """The highest rate at which the 95th percentile stays within the target, between the rates that were tried; NaN if
    all of them were too high, or none."""
    ordered = sorted(points, key=lambda point: point.rate)
    if ordered[0].p95 <= target:
        for a, b in itertools.pairwise(ordered):
            if b.p95 > target:
                share = 0.0 if b.p95 == float("inf") else (target - a.p95) / (b.p95 - a.p95)
                return a.rate + share * (b.rate - a.rate)
    return float("nan")


def rising(rates: Sequence[float]) -> Iterator[float]:
    """The rates, and then higher ones without end: what a server can do is known only where it cannot any more."""
    yield from rates
    rate = max(rates)
    while True:
        rate *= STEP
        yield rate


@contextlib.contextmanager
def replicas(number: int, size: str, method: str, max_queue: int = 64, log: str = "error") -> Iterator[Server]:
    """`nextscale serve --replicas NUMBER`, one thread each."""
    options = ["--replicas", str(number), "--port", "0", "--method", method, "--device", "cpu"]
    options += ["--max-queue", str(max_queue), "--log-level", log]
    command = [sys.executable, "-u", "-m", "nextscale", "serve", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        if found := re.search(r"ready at (http://\S+)", line):
            url = found[1]
            break
    if not url:
        raise SystemExit("the server did not start")
    try:
        yield Server(url, size, itertools.count(1000))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


@dataclass
class Server:
    url: str
    size: str
    seeds: Iterator[int]

    def body(self) -> dict[str, object]:
        seed = next(self.seeds)
        prompt = PROMPTS[seed * 7 % len(PROMPTS)]
        return {"prompt": prompt, "seed": seed, "size": self.size, "output_format": "jpeg"}

    def play(self, moments: Sequence[float]) -> tuple[list[Answer], float]:
        """Send a request at every moment, whatever became of the others; all answers, and the generator's CPU share."""

        async def run() -> list[Answer]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=None, limits=limits) as client:
                begun, tasks = time.monotonic(), []
                for moment in moments:
                    await asyncio.sleep(max(0.0, begun + moment - time.monotonic()))
                    tasks.append(asyncio.create_task(send(client, self.url, self.body())))
                return list(await asyncio.gather(*tasks))

        cpu, begun = time.process_time(), time.monotonic()
        answers = asyncio.run(run())
        return answers, (time.process_time() - cpu) / (time.monotonic() - begun)

    def idle_seconds(self, requests: int = 8) -> float:
        """Seconds of a request that is alone."""
        return statistics.median(self.play([0.0])[0][0].seconds for _ in range(requests))

    def point(self, moments: Sequence[float], rate: float) -> Point:
        answers, share = self.play(at_rate(moments, rate))
        refused = sum(answer.outcome != ACCEPTED for answer in answers)
        p95 = float("inf") if refused else quantile([answer.seconds for answer in answers], 0.95)
        return Point(rate, p95, refused, share)


def climb(measure: Callable[[float], Point], rates: Iterable[float], target: float) -> list[Point]:
    """Try rising rates until one is too high."""
    points: list[Point] = []
    for rate in rates:
        points.append(measure(rate))
        if points[-1].p95 > target:
            break
    return points
