"""An export by other processes than this one, as far as it takes none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nextscale.cluster.workers import LocalWorkers
from nextscale.research.export.plan import ExportPlan
from nextscale.research.export.run import export
from nextscale.testing import tiny_var


@pytest.mark.parametrize("by_others", [True, False])
def test_a_run_that_makes_nothing_is_not_among_those_that_made_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_others: bool
) -> None:
    """The driver has no GPU, so a run of its own would say that images of GPUs were made on a CPU, too."""
    (tmp_path / "labels.txt").write_text("0 1")
    plan, pipe, out = ExportPlan.read("imagenet", tmp_path / "labels.txt", images=2), tiny_var(), tmp_path / "out"
    assert export(pipe, plan, out).made == 4
    before = (out / "manifest.json").read_bytes()
    monkeypatch.setattr("nextscale.research.export.run.run_facts", lambda pipe, batch: {"device": "the driver's"})
    workers = LocalWorkers(pipe) if by_others else None
    assert export(pipe, plan, out, resume=True, workers=workers).made == 0
    assert (out / "manifest.json").read_bytes() == before
    assert len(json.loads(before)["runs"]) == 1
