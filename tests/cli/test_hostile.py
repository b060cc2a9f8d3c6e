"""The hostile run itself (`make test-hostile`): it has enough kinds of cases, and notices what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile.judge import Watch, faults, judge
from hostile.kinds import KINDS
from hostile.sandbox import write_models
from nextscale.checkpoints import files
from nextscale.methods import naming
from nextscale.text.words import Lexicon

PNG = (Path(__file__).parents[2] / "docs" / "kept.png").read_bytes()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    write_models(folder / "models")
    return folder


@pytest.fixture(scope="module")
def watch(root: Path) -> Watch:
    return Watch((root, Path("/proc")))


@pytest.fixture(autouse=True)
def _stay_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", [])


def test_there_are_enough_kinds() -> None:
    assert set(KINDS) == {"arguments", "configs", "weights", "prompts"}
    assert sum(map(len, KINDS.values())) >= 60
    assert min(map(len, KINDS.values())) >= 12


@pytest.mark.parametrize(
    ("case", "owner", "parser"),
    [
        (("prompts", "contradictions", 0), Lexicon, "parse"),
        (("weights", "odd state dicts", 0), files, "_inside"),
        (("arguments", "almost methods", 0), naming, "parse_method"),
    ],
)
def test_an_error_in_a_parser_is_noticed(case, owner, parser, root, watch, monkeypatch) -> None:
    found, *_ = judge(case, 0, root, watch)
    assert found == []

    def planted(*args: object, **options: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(owner, parser, planted)
    found, *_ = judge(case, 0, root, watch)
    assert "exit code 70" in found


def test_what_a_case_may_not_do(root: Path, watch: Watch, tmp_path: Path) -> None:
    with watch.watching() as seen:
        (root / "inside").write_text("x")
        (root / "inside").read_text()
        assert seen == []
        (tmp_path / "outside").write_text("x")
        (tmp_path / "folder").mkdir()
    assert len(seen) == 2
    (tmp_path / "unwatched").write_text("x")
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("code", "said", "after", "fault"),
    [
        (0, "", {"a": b"x", "b.png": PNG, "c.json": b"[1]"}, None),
        (2, "error: it is not so", {"a": b"x"}, None),
        (2, "WARNING: this\nerror: it is not so", {"a": b"x"}, None),
        (2, "Usage: nextscale", {"a": b"x"}, None),
        (1, "", {"a": b"x"}, "exit code 1"),
        (2, "error: it\nis not so", {"a": b"x"}, "not one sentence"),
        (2, "", {"a": b"x"}, "not one sentence"),
        (2, "error: " + 5000 * "x", {"a": b"x"}, "not one sentence"),
        (2, "error: \x1b[31m", {"a": b"x"}, "control character"),
        (2, "error: x", {"a": b"x", "b.png": PNG}, "left b.png behind"),
        (0, "", {"a": b"x", ".b.png.x": b"x"}, "left .b.png.x behind"),
        (0, "", {"a": b"y"}, "changed a"),
        (0, "", {}, "changed a"),
        (0, "", {"a": b"x", "b.png": PNG[:-20000]}, "b.png is not whole"),
        (0, "", {"a": b"x", "c.json": b"[NaN]"}, "c.json is not whole"),
        (0, "Traceback (most recent call last)", {"a": b"x"}, "a traceback"),
    ],
)
def test_faults(code: int, said: str, after: dict[str, bytes], fault: str | None) -> None:
    found = faults(code, "", said, {"a": b"x"}, after)
    assert found == [] if fault is None else any(fault in f for f in found)
