"""The simulation of replicas: what can be told without it, it must tell, too."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the benchmarks need it")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECOND = {1: {1: [1.0]}}  # of a batch of one, however many replicas are busy


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scale")


def latencies(done) -> list[float]:
    return [pytest.approx(done.latencies[n]) for n in sorted(done.latencies)]


def test_requests_that_meet_nobody(scale: ModuleType) -> None:
    done = scale.Simulation([0, 2, 4.5], 1, SECOND, overhead=0.25).run()
    assert latencies(done) == [1.25] * 3


def test_requests_that_wait(scale: ModuleType) -> None:
    assert latencies(scale.Simulation([0] * 4, 1, SECOND).run()) == [1, 2, 3, 4]
    assert sorted(scale.Simulation([0] * 4, 2, SECOND).run().latencies.values()) == pytest.approx([1, 1, 2, 2])
    assert latencies(scale.Simulation([0, 0.5, 0.75], 1, SECOND).run()) == [1, 1.5, 2.25]


def test_batches(scale: ModuleType) -> None:
    """The first leaves alone after the wait; those that come meanwhile leave together."""
    both = {1: {1: [1.0], 2: [1.2]}}
    done = scale.Simulation([0, 0.5, 0.6, 0.7], 1, both, batch_wait=0.005).run()
    assert latencies(done) == [1.005, 0.505 + 1.2, 0.405 + 1.2, 1.505 + 1.0]
    assert latencies(scale.Simulation([0, 0.001], 1, both, batch_wait=0.005).run()) == [1.201, 1.2]


def test_a_full_queue_refuses(scale: ModuleType) -> None:
    done = scale.Simulation([0] * 10, 1, SECOND, max_queue=3).run()
    assert (done.refused, len(done.latencies)) == (6, 4)
    assert scale.Simulation([0] * 10, 2, SECOND, max_queue=3).run().refused == 2


def test_the_mean_wait_that_theory_knows(scale: ModuleType) -> None:
    """Random arrivals, one server, equal services (M/D/1): load / (2 (1 - load)) services."""
    for load in (0.3, 0.6):
        moments = scale.at_rate(scale.poisson(40_000), load)
        waits = [seconds - 1 for seconds in scale.Simulation(moments, 1, SECOND).run().latencies.values()]
        assert statistics.mean(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.06)


def test_between_the_rates_that_were_tried(scale: ModuleType) -> None:
    points = [scale.Point(rate, p95) for rate, p95 in ((1.0, 1.0), (2.0, 2.0), (3.0, 6.0))]
    assert scale.sustained(points, 4.0) == pytest.approx(2.5)
    assert scale.sustained([*points[:2], scale.Point(3.0, float("inf"))], 4.0) == 2.0
    assert math.isnan(scale.sustained(points, 9.0)), "the highest rate tried is not the limit"
    assert math.isnan(scale.sustained(points, 0.5))


def test_rates_rise_until_one_is_too_high(scale: ModuleType) -> None:
    points = scale.search(lambda rate: scale.Point(rate, rate), [1.0, 2.0], 3.0)
    assert [point.rate for point in points] == pytest.approx([1, 2, 2.3, 2.645, 3.04175])
    assert scale.sustained(points, 3.0) == pytest.approx(3.0)


def test_a_target_that_every_rate_keeps(scale: ModuleType) -> None:
    points = scale.search(lambda rate: scale.Point(rate, 1.0), [1.0, 2.0], 3.0)
    assert 20 < points[-1].rate < 30
    assert math.isnan(scale.sustained(points, 3.0))


def test_rates_fall_where_the_first_is_too_high(scale: ModuleType) -> None:
    points = scale.search(lambda rate: scale.Point(rate, rate), [3.5, 4.0], 3.0)
    assert [point.rate for point in points] == pytest.approx([3.5, 3.5 / 1.15, 3.5 / 1.15**2])
    assert scale.sustained(points, 3.0) == pytest.approx(3.0)
    never = scale.search(lambda rate: scale.Point(rate, float("inf")), [3.5, 4.0], 3.0)
    assert never[-1].rate < 0.35
    assert math.isnan(scale.sustained(never, 3.0))


def test_who_is_alone_on_a_machine_is_faster(scale: ModuleType) -> None:
    """It is not the number of replicas that slows them down, but how many of them are busy."""
    shared = {1: {1: [1.0]}, 2: {1: [2.0]}}
    assert latencies(scale.Simulation([0, 5], 2, shared).run()) == [1, 1]
    assert latencies(scale.Simulation([0, 0.5, 5], 2, shared).run()) == [1, 2, 1]
    assert latencies(scale.Simulation([0, 0], 3, shared).run()) == [1, 2], "three were not measured"


@pytest.mark.parametrize(("slow", "within", "fails"), [(1.0, "0.15", False), (1.2, "0.15", True), (1.2, "0.8", False)])
def test_a_prediction_that_is_too_far_off_fails(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch, slow: float, within: str, fails: bool
) -> None:
    @contextlib.contextmanager
    def replicas(number: int, *given: Any) -> Iterator[Any]:
        """Real ones, slower than was measured."""
        times = scale.Times({1: {1: [slow]}}, 0.0)
        yield SimpleNamespace(
            alone=lambda *given: None,
            point=lambda moments, rate: scale.simulated(times, number, moments, rate),
        )

    monkeypatch.setattr(scale, "replicas", replicas)
    monkeypatch.setattr(scale, "measure", lambda options: scale.Times({1: {1: [1.0]}}, 0.0))
    monkeypatch.setattr(sys, "argv", ["scale.py", "validate", "--target", "5", "--within", within])
    with pytest.raises(SystemExit) as ended:
        scale.main()
    assert ended.value.code == fails


def test_what_is_measured(scale: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Batches of every size by busy replicas, and what an idle one takes besides."""
    answer = importlib.import_module("serving").Answer
    asked: list[tuple[int, int, int, int]] = []

    @contextlib.contextmanager
    def replicas(number: int, options: Any, max_batch: int) -> Iterator[Any]:
        def busy_seconds(requests: int, clients: int) -> list[float]:
            asked.append((number, max_batch, requests, clients))
            return [number + max_batch / 10]

        alone = [answer({}, 0.0, seconds=2.0 + late, batch_seconds=1.75) for late in (0.0, 0.1, 9.0)]
        yield SimpleNamespace(alone=lambda: alone, busy_seconds=busy_seconds)

    monkeypatch.setattr(scale, "replicas", replicas)
    out = tmp_path / "times.json"
    given = ["measure", "--max-batch", "3", "--batches", "5", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["scale.py", *given])
    scale.main()
    times = scale.Times.read(out)
    assert times.batches == {1: {1: [1.1], 2: [1.2], 3: [1.3]}, 2: {1: [2.1], 2: [2.2], 3: [2.3]}}
    assert times.overhead == pytest.approx(0.35)
    assert asked[:3] == [(1, 1, 5, 2), (1, 2, 10, 4), (1, 3, 15, 6)]
    assert asked[3:] == [(2, 1, 10, 4), (2, 2, 20, 8), (2, 3, 30, 12)]


def test_busy_replicas_without_the_beginning_and_the_end(scale: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals, answer = importlib.import_module("arrivals"), importlib.import_module("serving").Answer
    running, numbers = 0, itertools.count()

    async def send(http: Any, url: str, body: dict[str, Any]) -> Any:
        nonlocal running
        running += 1
        at_once = running
        await asyncio.sleep(0)
        running -= 1
        return answer(body, 0.0, arrivals.ACCEPTED, batch_seconds=next(numbers) + 100 * at_once)

    monkeypatch.setattr(arrivals, "send", send)
    found = arrivals.Server("http://nobody", "256x256", itertools.count()).busy_seconds(8, 3)
    assert len(found) == 8
    assert [seconds % 100 for seconds in found] == list(range(3, 11))
    assert min(found) > 100


def test_too_little_throughput_fails(scale: ModuleType) -> None:
    cluster = importlib.import_module("cluster")
    for found, code in ((0.9, False), (0.89, True), (float("nan"), True)):
        with pytest.raises(SystemExit) as ended:
            cluster.judge(found, 0.9)
        assert ended.value.code == code


def test_replicas_for_a_target(
    scale: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"batches": {"1": {"1": [0.5]}, "2": {"1": [1.0]}}, "overhead": 0.1}
    (tmp_path / "times.json").write_text(json.dumps(times))
    (tmp_path / "trace.txt").write_text("10.0\n10.0\n10.0\n11.0")
    asked = ["scale.py", "predict", "--times", str(tmp_path / "times.json"), "--trace", str(tmp_path / "trace.txt")]
    monkeypatch.setattr(sys, "argv", [*asked, "--target", "1.2"])
    scale.main()
    said = capsys.readouterr().out
    assert "4 arrivals, 4.00 a second" in said
    assert "4 replicas are enough" in said, "two at once are slower than one alone"
    monkeypatch.setattr(sys, "argv", [*asked, "--target", "0.5", "--most", "4"])
    with pytest.raises(SystemExit):
        scale.main()
    assert "4 replicas are not enough" in capsys.readouterr().out
