"""The command is killed in the middle, with a cluster of its own and on one that outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from processes import descendants, is_running, titled, wait_for
from ray.cluster_utils import Cluster
from support import files
from support.files import VAR_CASE
from test_export import content, manifest, require_same, stamps

from nextscale.io.locking import LOCK
from nextscale.io.writing import UNFINISHED

ARGUMENTS = ["export", "imagenet", "--prompts", "labels.txt", "--weights", "mine.pth", "--images", "40", "--batch", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, labels, and the export of one process."""
    folder = tmp_path_factory.mktemp("files")
    files.tokenizer(folder, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    files.flat(folder, VAR_CASE, "mine.pth")
    (folder / "labels.txt").write_text("0 1 2 3 4 5 6")
    run(folder, "whole")
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    ray.shutdown()
    node = {"num_cpus": 2, "object_store_memory": 10**8, "include_dashboard": False}
    cluster = Cluster(True, head_node_args=node)
    yield cluster
    cluster.shutdown()


def start(folder: Path, out: str, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nextscale", *ARGUMENTS, "--out", out, "--quiet", *options]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE)


def run(folder: Path, out: str, *options: str) -> None:
    process = start(folder, out, *options)
    errors = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 0, errors


def kill_in_the_middle(
    folder: Path, out: str, *options: str, workers: int = 0
) -> tuple[set[int], dict[str, tuple[int, int]]]:
    """Kill the command once it has made 20 images, and so many of its workers have begun."""
    process = start(folder, out, *options)
    assert wait_for(
        lambda: (
            len(list((folder / out / "images").glob("*.png"))) >= 20
            and len(descendants(process.pid) & set(titled("ray::MapWorker"))) >= workers
        )
    )
    children = descendants(process.pid) - {process.pid}
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    return children, stamps(folder / out)


@contextlib.contextmanager
def watched(out: Path) -> Iterator[dict[str, set[tuple[int, int]]]]:
    """All stamps that files have had meanwhile."""
    seen, ended = defaultdict[str, set[tuple[int, int]]](set), threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            with contextlib.suppress(FileNotFoundError):
                for name, stamp in stamps(out).items():
                    seen[name].add(stamp)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield seen
    ended.set()
    thread.join()


def require_resumed(folder: Path, out: str, before: dict[str, tuple[int, int]]) -> None:
    require_same(folder / out, folder / "whole")
    assert before.items() <= stamps(folder / out).items(), "nothing was made twice"
    assert not list((folder / out).rglob(f"*{UNFINISHED}"))


def test_its_cluster_ends_with_it(folder: Path) -> None:
    children, _ = kill_in_the_middle(folder, "own", "--workers", "ray", "--replicas", "2", workers=2)
    workers = children & set(titled("ray::MapWorker"))
    assert len(workers) == 2
    assert wait_for(lambda: not any(map(is_running, workers)), 30), "nobody goes on writing"
    for pid in filter(is_running, children):  # Ray's agents wait a minute longer for the cluster to come back
        os.kill(pid, signal.SIGKILL)
    left = content(folder / "own")
    assert 20 <= len(left) < 280
    assert left.items() <= content(folder / "whole").items(), "every file is whole"
    before = stamps(folder / "own")
    run(folder, "own", "--workers", "ray", "--replicas", "2", "--resume")
    require_resumed(folder, "own", before)


def test_its_cluster_outlives_it(folder: Path, cluster: Cluster) -> None:
    """The next run begins while the workers of the first may still be at work."""
    options = ("--workers", "ray", "--address", cluster.address)
    _, before = kill_in_the_middle(folder, "shared", *options)
    with watched(folder / "shared") as seen:
        run(folder, "shared", *options, "--resume")
    require_same(folder / "shared", folder / "whole")
    assert before.items() <= stamps(folder / "shared").items()
    assert [name for name, found in seen.items() if len(found) > 1] == [], "nothing was made twice"
    assert not (folder / "shared" / LOCK).exists()


def test_one_process_goes_on_with_what_workers_began(folder: Path, cluster: Cluster) -> None:
    kill_in_the_middle(folder, "mixed", "--workers", "ray", "--address", cluster.address)
    assert wait_for(lambda: stamps(folder / "mixed") == stamps(folder / "mixed"))
    run(folder, "mixed", "--resume")
    assert content(folder / "mixed") == content(folder / "whole")
    assert manifest(folder / "mixed") == manifest(folder / "whole")
