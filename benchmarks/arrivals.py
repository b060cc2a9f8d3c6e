"""Arrivals at random moments, played against a server: what latency at which rate. For cluster.py and scale.py."""

from __future__ import annotations

import argparse
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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from serving import ACCEPTED, PROMPTS, Answer, send

STEP = 1.15  # from one rate to the next, where those that were asked for are not enough
FARTHEST = 10.0  # times as fast or as slow as was asked for; then there is no such rate
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


def search(measure: Callable[[float], Point], rates: Sequence[float], target: float) -> list[Point]:
    """Try rising rates until one is too high, and higher ones than were asked for where none is; if the first is too
    high, lower ones. What a server can do is known between one that it can bear and one that it cannot."""
    points = [measure(rates[0])]
    if points[0].p95 > target:
        while points[-1].p95 > target and points[-1].rate > rates[0] / FARTHEST:
            points.append(measure(points[-1].rate / STEP))
        return points
    while points[-1].p95 <= target and points[-1].rate < rates[-1] * FARTHEST:
        points.append(measure(rates[len(points)] if len(points) < len(rates) else points[-1].rate * STEP))
    return points


def add_model(parser: argparse.ArgumentParser) -> None:
    """What is served, and asked for."""
    parser.add_argument("--model", default="clipart")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="256x256")
    parser.add_argument("--method", default="truncate:4")


@contextlib.contextmanager
def replicas(number: int, options: argparse.Namespace, max_batch: int = 1, max_queue: int = 64) -> Iterator[Server]:
    """`nextscale serve --replicas NUMBER`, one thread each."""
    command = [sys.executable, "-u", "-m", "nextscale", "serve", "--replicas", str(number), "--port", "0"]
    command += ["--model", options.model, "--method", options.method, "--device", options.device]
    command += ["--max-batch", str(max_batch), "--max-queue", str(max_queue), "--log-level", "error"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT)
        assert process.stdout is not None
        found = next(filter(None, (re.search(r"ready at (http://\S+)", line) for line in process.stdout)), None)
        if found is None:
            errors.seek(0)
            raise SystemExit(f"the server did not start: {errors.read()}")
        try:
            yield Server(found[1], options.size, itertools.count(1000))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # that is no reason to lose what was measured
                process.kill()


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

    def alone(self, requests: int = 8) -> list[Answer]:
        """Answers to requests that meet nobody."""
        return [self.play([0.0])[0][0] for _ in range(requests)]

    def idle_seconds(self, requests: int = 8) -> float:
        """Seconds of a request that is alone."""
        return statistics.median(answer.seconds for answer in self.alone(requests))

    def busy_seconds(self, requests: int, clients: int) -> list[float]:
        """Seconds of batches while so many clients ask one request after another; without those of the beginning and
        of the end, when fewer are at work."""
        bodies, answers = [self.body() for _ in range(requests + 2 * clients)], list[Answer]()

        async def run() -> None:
            async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as http:

                async def ask() -> None:
                    while bodies:
                        answers.append(await send(http, self.url, bodies.pop()))
                        assert answers[-1].outcome == ACCEPTED, answers[-1].outcome

                await asyncio.gather(*(ask() for _ in range(clients)))

        asyncio.run(run())
        return [answer.batch_seconds for answer in answers[clients:-clients]]

    def point(self, moments: Sequence[float], rate: float) -> Point:
        answers, share = self.play(at_rate(moments, rate))
        refused = sum(answer.outcome != ACCEPTED for answer in answers)
        p95 = float("inf") if refused else quantile([answer.seconds for answer in answers], 0.95)
        return Point(rate, p95, refused, share)
