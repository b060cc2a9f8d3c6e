"""The examples, run as a reader would, on small images."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each leaves behind, and the arguments that keep it cheap.
MADE: dict[str, tuple[list[str], set[str]]] = {
    "first_image": ([], {"fox.png"}),
    "compare_methods": (["truncate:2"], set()),
    "own_method": ([], {"edges.png"}),
    "batch_with_traces": ([], {"image-0.png", "image-1.png", "image-2.png", "traces.json", "maps.npz"}),
    "stream_scales": ([], {"penguin.png", *(f"scale-0{i}.png" for i in range(1, 8))}),
}


def test_all_are_run_and_short() -> None:
    scripts = list(EXAMPLES.glob("*.py"))
    assert {path.stem for path in scripts} == set(MADE)
    assert all(len(path.read_text().splitlines()) < 40 for path in scripts)


@pytest.mark.parametrize("name", MADE)
def test_example(name: str, tmp_path: Path) -> None:
    arguments, files = MADE[name]
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PIXEL_BUDGET": "0.06M"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == files
    assert done.stdout
