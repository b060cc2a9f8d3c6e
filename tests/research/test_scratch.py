"""Unfinished files of an export: those of an earlier run can no longer be finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from nextscale.errors import NextscaleError
from nextscale.io.writing import atomic_write
from nextscale.research.export.folder import ExportFolder
from nextscale.research.export.plan import WHOLE, Shard


@pytest.mark.parametrize("shard", [WHOLE, Shard(2, 4)], ids=str)
def test_a_worker_of_a_dead_driver_finishes_nothing(tmp_path: Path, shard: Shard) -> None:
    folder = ExportFolder(tmp_path, shard)
    first = folder.scratch()
    theirs = first.__enter__()  # and its driver dies
    image = folder.images / "1.png"
    with pytest.raises(NextscaleError, match="cannot write"), atomic_write(image, theirs) as file:  # noqa: PT012
        file.write(b"theirs")
        second = folder.scratch()
        ours = second.__enter__()
    with pytest.raises(NextscaleError, match="cannot write"), atomic_write(image, theirs):
        pass
    assert not image.exists()
    with atomic_write(image, ours) as file:
        file.write(b"ours")
    assert image.read_bytes() == b"ours"
    assert list(ours.iterdir()) == []
    second.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_shards_leave_each_other_alone(tmp_path: Path) -> None:
    with ExportFolder(tmp_path, Shard(2, 40)).scratch() as other, ExportFolder(tmp_path, Shard(2, 4)).scratch() as mine:
        assert other.exists()
        assert mine.exists()
