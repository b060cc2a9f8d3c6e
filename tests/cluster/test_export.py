"""Exports by workers: the same bytes, whoever dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from slow_models import slow, texts

from nextscale.cluster.ray_workers import RayActorWorkers, RayDataWorkers
from nextscale.errors import NextscaleError
from nextscale.pipeline import Pipeline
from nextscale.research.export.plan import ExportPlan, Shard
from nextscale.research.export.run import export
from nextscale.testing import tiny_var

CORE = {"CPU": 1.0}
LABELS = "0 1 2 3 4 5 6"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plan(tmp_path: Path) -> ExportPlan:
    (tmp_path / "labels.txt").write_text(LABELS)
    return ExportPlan.read("imagenet", tmp_path / "labels.txt", images=8)


def content(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in (out / "images").rglob("*") if p.is_file()}


def stamps(out: Path) -> dict[str, tuple[int, int]]:
    """A file that is written again is another file, or changed later."""
    found = {p.name: p.stat() for p in (out / "images").rglob("*") if p.is_file()}
    return {name: (s.st_ino, s.st_mtime_ns) for name, s in found.items()}


def manifest(out: Path) -> bytes:
    return (out / "manifest.json").read_bytes().replace(str(out).encode(), b"OUT")


def require_same(out: Path, whole: Path) -> None:
    assert content(out) == content(whole)
    assert manifest(out) == manifest(whole)
    assert sorted(p.name for p in out.iterdir()) == ["images", "manifest.json"]


def interfere(out: Path, images: int, act: Any) -> tuple[threading.Thread, dict[str, Any]]:
    """Do something when so many images are there; what was there before is noted."""
    before: dict[str, Any] = {}

    def wait() -> None:
        while len(list((out / "images").rglob("*.png"))) < images:
            time.sleep(0.01)
        before.update(stamps(out))
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, before


@pytest.mark.usefixtures("two_cores")
def test_the_same_bytes_as_in_one_process(plan: ExportPlan, tmp_path: Path) -> None:
    pipe, workers = tiny_var(), RayDataWorkers(tiny_var, 2, CORE)
    export(pipe, plan, tmp_path / "whole", batch=3)
    done = export(pipe, plan, tmp_path / "out", batch=3, workers=workers)
    require_same(tmp_path / "out", tmp_path / "whole")
    assert done.made == 56
    assert sorted(row.path for row in done.images) == sorted(p.path for p in plan.image_files)
    assert {row.tokens for row in done.images} == {pipe.schedule().tokens}
    assert min(row.ms for row in done.images) > 0
    (tmp_path / "out" / "images" / "01004.png").unlink()  # in the middle of a batch
    before = stamps(tmp_path / "out")
    assert export(pipe, plan, tmp_path / "out", batch=3, workers=workers, resume=True).made == 1
    require_same(tmp_path / "out", tmp_path / "whole")
    after = stamps(tmp_path / "out")
    assert {name for name in after if after[name] != before.get(name)} == {"01004.png"}
    shard = export(pipe, plan, tmp_path / "part", batch=3, workers=workers, shard=Shard(2, 2))
    assert 0 < shard.made < 56
    assert content(tmp_path / "part").items() <= content(tmp_path / "whole").items()


@pytest.mark.usefixtures("two_cores")
def test_files_that_belong_to_images(tmp_path: Path) -> None:
    lines = [f'{{"tag": "single_object", "include": [], "prompt": "a {name}"}}' for name in ("fox", "tree", "car")]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    plan, pipe = ExportPlan.read("geneval", tmp_path / "p.jsonl"), texts()
    options = {"batch": 2, "pixel_budget": "0.06M"}
    export(pipe, plan, tmp_path / "whole", **options)
    export(pipe, plan, tmp_path / "out", workers=RayDataWorkers(texts, 2, CORE), **options)
    require_same(tmp_path / "out", tmp_path / "whole")
    assert len(list((tmp_path / "out").rglob("metadata.jsonl"))) == 3


@pytest.mark.usefixtures("two_cores")
def test_a_worker_is_killed(plan: ExportPlan, tmp_path: Path) -> None:
    pipe, out, pids = tiny_var(), tmp_path / "out", tmp_path / "pids"
    export(pipe, plan, tmp_path / "whole", batch=2)
    workers = RayDataWorkers(slow(pids), 2, CORE)

    def kill() -> None:
        os.kill(int(next(pids.iterdir()).name), signal.SIGKILL)

    thread, before = interfere(out, 10, kill)
    done = export(pipe, plan, out, batch=2, workers=workers)
    assert not thread.is_alive()
    assert len(list(pids.iterdir())) == 3, "another took its place"
    require_same(out, tmp_path / "whole")
    assert before.items() <= stamps(out).items(), "nothing was made twice"
    assert done.missing == 0


@pytest.mark.usefixtures("two_cores")
def test_failures_are_named(plan: ExportPlan, tmp_path: Path) -> None:
    pipe, out = tiny_var(), tmp_path / "out"
    export(pipe, plan, tmp_path / "whole", batch=4)
    with pytest.raises(NextscaleError, match=r"8 of 14 parts failed: 00000\.png: class 3 is not .*; and 5 more"):
        export(pipe, plan, out, batch=4, workers=RayDataWorkers(slow(bad=3), 2, CORE))
    assert len(content(out)) == 24, "the others were made"
    before = stamps(out)
    done = export(pipe, plan, out, batch=4, workers=RayDataWorkers(tiny_var, 2, CORE), resume=True)
    assert done.made == 32
    require_same(out, tmp_path / "whole")
    assert before.items() <= stamps(out).items()


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("kind", [RayDataWorkers, RayActorWorkers])
def test_a_worker_that_cannot_load_says_so(kind: Any) -> None:
    """In a sentence for the user, not with a traceback of Ray's."""

    def broken() -> Pipeline:
        raise NextscaleError("no weights lie at /here")

    with pytest.raises(NextscaleError, match=r"^a worker cannot begin: no weights lie at /here$"):
        list(kind(broken, 1, CORE).map(lambda pipe: str, ["a", "b"]))


@pytest.mark.usefixtures("two_cores")
def test_what_fails_at_once_leaves_nothing(plan: ExportPlan, tmp_path: Path) -> None:
    def broken() -> Pipeline:
        raise RuntimeError("no such weights")

    with pytest.raises(Exception, match="no such weights"):
        export(tiny_var(), plan, tmp_path / "out", workers=RayDataWorkers(broken, 2, CORE))
    assert not (tmp_path / "out").exists()


def test_a_node_goes_away(plan: ExportPlan, tmp_path: Path) -> None:
    pipe, out = tiny_var(), tmp_path / "out"
    export(pipe, plan, tmp_path / "whole", batch=2)
    ray.shutdown()
    node = {"num_cpus": 1, "object_store_memory": 10**8}
    soon = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
    cluster = Cluster(True, head_node_args={**node, "include_dashboard": False, "_system_config": soon})
    try:
        second = cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        workers = RayDataWorkers(slow(), 2, CORE)
        thread, before = interfere(out, 12, lambda: cluster.remove_node(second, allow_graceful=False))
        done = export(pipe, plan, out, batch=2, workers=workers)
        assert not thread.is_alive()
    finally:
        ray.shutdown()
        cluster.shutdown()
    require_same(out, tmp_path / "whole")
    assert before.items() <= stamps(out).items(), "nothing was made twice"
    assert done.missing == 0
