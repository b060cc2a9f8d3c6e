"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nextscale.writing import whole_file


def test_a_file_may_be_read_by_others(tmp_path: Path) -> None:
    """Scratch files are private; what they become is not."""
    before = os.umask(0o077)
    try:
        with whole_file(tmp_path / "a.txt") as file:
            file.write(b"x")
            (scratch,) = tmp_path.iterdir()
            assert scratch.name != "a.txt"
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o644


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")

    def write() -> None:
        with whole_file(tmp_path / "a.txt") as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"
