"""Evaluations and calibrations by workers: the results of one process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import wait_for
from slow_models import slow

from nextscale import Pipeline, SparseVAR, Truncate
from nextscale.cluster.ray_workers import RayActorWorkers, RayDataWorkers
from nextscale.errors import NextscaleError
from nextscale.research.calibrate import sparsevar, toprovar
from nextscale.research.calibrate.shares import measure_shares
from nextscale.research.evaluate import session
from nextscale.research.evaluate.bench import Bench, make_items
from nextscale.research.evaluate.scenes import first_per_task, read_scene_prompts
from nextscale.testing import tiny_var

CORE, HALF = {"CPU": 1.0}, {"CPU": 0.5}
LABELS = [i % 10 for i in range(64)]
pytestmark = pytest.mark.usefixtures("two_cores")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cells(folder: Path) -> dict[str, Any]:
    """All that is stored of an evaluation, but seconds."""
    found: dict[str, Any] = {"settings": (folder / "settings.json").read_bytes()}
    for path in sorted((folder / "cells").iterdir()):
        if path.suffix == ".json":
            found[path.name] = [{k: v for k, v in r.items() if k != "seconds"} for r in json.loads(path.read_text())]
        else:
            found[path.name] = path.read_bytes()
    return found


def test_an_evaluation(tmp_path: Path) -> None:
    pipe = Pipeline.from_pretrained(progress_bar=False)
    items = make_items(first_per_task(read_scene_prompts("white"), 1), 1)[:4]
    methods = {"none": None, "truncate:2": Truncate(2)}
    made, results = {}, {}
    for name, workers in (("one", None), ("two", RayDataWorkers(Pipeline.from_pretrained, 2, CORE))):
        bench = Bench(pipe, items, 2, tmp_path / name, False, {"pixel_budget": "0.06M"}, (), workers)
        session.open_folder(bench)
        found = bench.run(methods, reference=True)
        session.save(bench, methods, found, [])
        made[name] = cells(tmp_path / name)
        results[name] = json.loads((tmp_path / name / "results.json").read_text())
    assert made["one"] == made["two"]
    assert len(made["one"]) == 1 + 2 * 3
    assert results["one"]["run"] == results["two"]["run"]
    path = next(p for p in (tmp_path / "two" / "cells").iterdir() if "truncate" in p.name)
    path.unlink()
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "two" / "cells").iterdir()}
    bench.run(methods, reference=True)
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "two" / "cells").iterdir()}
    assert before.items() < after.items()
    assert set(after) - set(before) == {path.name}
    assert cells(tmp_path / "two") == made["one"]


@pytest.fixture(scope="module")
def workers(two_cores: None) -> RayActorWorkers:
    return RayActorWorkers(tiny_var, 2, HALF)


def test_shares(workers: RayActorWorkers) -> None:
    asked = {"method": SparseVAR(tau=0.3), "seed": 5}
    assert measure_shares(tiny_var(), LABELS, workers=workers, **asked) == measure_shares(tiny_var(), LABELS, **asked)


def test_thresholds(workers: RayActorWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toprovar, "BISECTIONS", 2)
    monkeypatch.setattr(sparsevar, "BISECTIONS", 2)
    monkeypatch.setattr(sparsevar, "BLOCKS", 2)
    for calibrate in (toprovar.calibrate_toprovar, sparsevar.calibrate_sparsevar):
        assert calibrate(tiny_var(), LABELS, workers=workers) == calibrate(tiny_var(), LABELS)


def test_a_worker_dies_between_two_passes_and_in_one(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    workers, asked = RayActorWorkers(slow(pids), 2, HALF), {"method": SparseVAR(tau=0.3)}
    alone = measure_shares(tiny_var(), LABELS, **asked)
    assert wait_for(lambda: len(list(pids.iterdir())) == 2)
    first, second = (int(path.name) for path in pids.iterdir())
    timer = threading.Timer(0.4, os.kill, (first, signal.SIGKILL))
    timer.start()
    assert measure_shares(tiny_var(), LABELS, workers=workers, **asked) == alone
    assert measure_shares(tiny_var(), LABELS, workers=workers, **asked) == alone
    os.kill(second, signal.SIGKILL)
    with pytest.raises(NextscaleError, match="all workers died"):
        measure_shares(tiny_var(), LABELS, workers=workers, **asked)
