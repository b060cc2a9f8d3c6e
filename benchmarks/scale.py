"""How many replicas a latency target takes: the engine's own queue, driven by a virtual clock.

    python benchmarks/scale.py measure --out times.json             # seconds of batches here, of 1 and of 2 replicas
    python benchmarks/scale.py predict --times times.json --rate 12 --target 3 [--trace arrivals.txt]
    python benchmarks/scale.py validate [--requests 150]            # measured beside predicted, 1 and 2 replicas

`measure` keeps servers busy with batches of every size, with as many replicas at once as there will be on a machine,
and stores the seconds of each batch, so what Ray and its proxy take of shared cores is in them; and it asks an idle
replica, for what a request takes besides its batch. `predict` plays arrivals, random ones at a rate or a file with a
moment in seconds per line, against 1, 2, 3, ... replicas: an arrival goes to the less busy of two replicas, as Ray
Serve routes it, waits in the engine's `BatchQueue`, and takes the measured seconds of a batch, drawn from those with as
many replicas at work as there are when it begins. Nothing is computed by a formula. `validate` measures, then finds the
rate at which the 95th percentile reaches the target, by the simulation and by real replicas with the same arrivals; it
fails if they are too far apart.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arrivals import Point, add_model, at_rate, poisson, quantile, read_trace, replicas, search, sustained
from nextscale.serve.batching import BatchQueue

AGE_LIMIT = 2.0  # as in the engine's `Limits`
INFINITE = float("inf")


@dataclass(frozen=True)
class Times:
    """What was measured: seconds of batches, by replicas at work at once and by images of a batch."""

    batches: dict[int, dict[int, list[float]]]
    overhead: float  # seconds of a request besides its batch

    @classmethod
    def read(cls, path: Path) -> Times:
        content = json.loads(path.read_text())
        counted = {int(n): {int(size): s for size, s in sizes.items()} for n, sizes in content["batches"].items()}
        return cls(counted, content["overhead"])


@dataclass(eq=False)
class Replica:
    queue: BatchQueue[int]  # of arrivals, by their numbers
    running: int = 0

    @property
    def ongoing(self) -> int:
        return self.running + len(self.queue)


@dataclass
class Simulation:
    """Replicas under arrivals. `batches` has seconds by replicas at work and by images of a batch; the largest is the
    replicas' limit."""

    moments: Sequence[float]
    replicas: int
    batches: dict[int, dict[int, list[float]]]
    overhead: float = 0.0
    max_queue: int = 64
    batch_wait: float = 0.005
    seed: int = 0
    latencies: dict[int, float] = field(default_factory=dict)
    refused: int = 0

    def run(self) -> Simulation:
        self.draw, self.max_batch = random.Random(self.seed), max(self.batches[min(self.batches)])
        self.servers = [Replica(BatchQueue(self.batch_wait, AGE_LIMIT)) for _ in range(self.replicas)]
        self.order = itertools.count()
        self.events: list[Any] = []
        for number, moment in enumerate(self.moments):
            self.at(moment, self.arrive, number)
        while self.events:
            now, _, act, arguments = heapq.heappop(self.events)
            act(now, *arguments)
        return self

    def at(self, moment: float, act: Any, *arguments: Any) -> None:
        heapq.heappush(self.events, (moment, next(self.order), act, arguments))

    def arrive(self, now: float, number: int) -> None:
        some = self.draw.sample(self.servers, min(2, self.replicas))
        server = min(some, key=lambda replica: replica.ongoing)
        if len(server.queue) >= self.max_queue:
            self.refused += 1
            return
        server.queue.add(number, "one kind", now)
        self.look(now, server)

    def look(self, now: float, server: Replica) -> None:
        """What the engine's thread does when something has changed."""
        if server.running:
            return
        batch, wait = server.queue.next_batch(now, lambda number: self.max_batch)
        if batch:
            server.running = len(batch)
            self.at(now + self.draw.choice(self.seconds(len(batch))), self.finish, server, batch)
        elif wait is not None:
            self.at(now + wait, self.look, server)

    def seconds(self, images: int) -> list[float]:
        """What batches took with as many at work as there are now, or with the most that were measured."""
        busy = sum(server.running > 0 for server in self.servers)
        batches = self.batches[max(n for n in self.batches if n <= max(busy, min(self.batches)))]
        return batches[min(size for size in batches if size >= images)]

    def finish(self, now: float, server: Replica, batch: list[int]) -> None:
        server.running = 0
        for number in batch:
            self.latencies[number] = now - self.moments[number] + self.overhead
        self.look(now, server)

    def p(self, share: float) -> float:
        return quantile(list(self.latencies.values()), share) if self.latencies else INFINITE


def simulated(times: Times, replicas: int, moments: Sequence[float], rate: float, max_queue: int = 64) -> Point:
    done = Simulation(at_rate(moments, rate), replicas, times.batches, times.overhead, max_queue).run()
    return Point(rate, INFINITE if done.refused else done.p(0.95), done.refused)


def measure(options: argparse.Namespace) -> Times:
    """Seconds of batches of as many replicas at once, and what a request takes besides."""
    batches: dict[int, dict[int, list[float]]] = {}
    overhead = None
    for number in map(int, options.replicas.split(",")):
        batches[number] = {}
        for size in sizes(options.max_batch):
            with replicas(number, options, size) as server:
                if overhead is None:
                    alone = server.alone()
                    overhead = max(0.0, statistics.median(a.seconds - a.batch_seconds for a in alone))
                # Twice as many clients as there is room for in batches: one batch runs, and one waits.
                found = server.busy_seconds(options.batches * size * number, 2 * size * number)
            batches[number][size] = found
            print(f"{number} replicas, batches of {size}: {statistics.median(found):.3f} s in the median", flush=True)
    assert overhead is not None
    print(f"a request takes {1000 * overhead:.0f} ms besides its batch", flush=True)
    return Times(batches, overhead)


def sizes(max_batch: int) -> list[int]:
    """The powers of two up to the limit, and the limit."""
    return sorted({max_batch, *(2**n for n in range(max_batch.bit_length()))})


def predict(options: argparse.Namespace) -> None:
    times = Times.read(options.times)
    moments = read_trace(options.trace) if options.trace else poisson(options.requests)
    moments = at_rate(moments, options.rate) if options.rate else moments
    rate = len(moments) / moments[-1]
    print(f"{len(moments)} arrivals, {rate:.2f} a second; the 95th percentile may take {options.target:g} s")
    print("replicas   p50      p95      p99      refused")
    for number in range(1, options.most + 1):
        done = Simulation(moments, number, times.batches, times.overhead, options.max_queue).run()
        shown = "  ".join(f"{done.p(share):7.2f}" for share in (0.5, 0.95, 0.99))
        print(f"{number:8}  {shown}  {done.refused:7}")
        if done.p(0.95) <= options.target and not done.refused:
            print(f"{number} replicas are enough")
            return
    print(f"{options.most} replicas are not enough")
    raise SystemExit(1)


def validate(options: argparse.Namespace) -> None:
    times, moments = measure(options), poisson(options.requests)
    shares = [float(share) for share in options.shares.split(",")]
    alone = statistics.median(times.batches[min(times.batches)][1]) + times.overhead
    target = options.target or 3 * alone
    print(f"{options.requests} arrivals; the 95th percentile may take {target:.2f} s", flush=True)
    worst = 0.0
    for number in (1, 2):
        rates = [share * number / alone for share in shares]
        expected = search(lambda rate, n=number: simulated(times, n, moments, rate), rates, target)
        with replicas(number, options, options.max_batch) as server:
            server.alone(2 * number)
            found = search(lambda rate, s=server: s.point(moments, rate), rates, target)
        for rate in sorted({point.rate for point in (*expected, *found)}):
            points = [(p, how) for all_, how in ((expected, "predicted"), (found, "measured")) for p in all_]
            said = [f"p95 {p.p95:.2f} s {how}" for p, how in points if p.rate == rate]
            print(f"{number} replicas, {rate:.2f} requests a second: {', '.join(said)}")
        predicted, measured = sustained(expected, target), sustained(found, target)
        error = predicted / measured - 1
        worst = max(worst, INFINITE if error != error else abs(error))  # the lowest rate was too high
        print(f"{number} replicas: {predicted:.2f} predicted, {measured:.2f} measured within the target, {error:+.1%}")
    print(f"farthest prediction: {worst:.1%}; asked: at most {options.within:.0%}")
    raise SystemExit(worst > options.within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(required=True)
    made = {name: kinds.add_parser(name) for name in ("measure", "predict", "validate")}
    for name in ("measure", "validate"):
        add_model(made[name])
        made[name].add_argument("--batches", type=int, default=40, help="of every size and replica")
        made[name].add_argument("--max-batch", type=int, default=1)
        made[name].add_argument("--replicas", default="1,2", help="at once; on GPUs of their own, 1 is enough")
    for name in ("predict", "validate"):
        made[name].add_argument("--requests", type=int, default=150 if name == "validate" else 2000)
        made[name].add_argument("--target", type=float, required=name == "predict", help="seconds at p95")
    made["measure"].add_argument("--out", type=Path, default=Path("times.json"))
    made["predict"].add_argument("--times", type=Path, required=True)
    made["predict"].add_argument("--rate", type=float, help="requests a second; default: those of the trace")
    made["predict"].add_argument("--trace", type=Path, help="a file with a moment in seconds per line")
    made["predict"].add_argument("--most", type=int, default=1000, help="replicas")
    made["predict"].add_argument("--max-queue", type=int, default=64)
    shares = "of what one allows; others follow if needed"
    made["validate"].add_argument("--shares", default="0.5,0.6,0.7,0.8,0.9", help=shares)
    made["validate"].add_argument("--within", type=float, default=0.15, help="what may be wrong; else it exits with 1")
    for name, run in (("predict", predict), ("validate", validate)):
        made[name].set_defaults(run=run)
    made["measure"].set_defaults(run=lambda options: store(measure(options), options.out))
    options = parser.parse_args()
    options.run(options)


def store(times: Times, path: Path) -> None:
    path.write_text(json.dumps({"batches": times.batches, "overhead": times.overhead}))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
