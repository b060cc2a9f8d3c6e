"""One picture of two runs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import ask
from nextscale import NOVA, Truncate
from nextscale.analyze.comparison import computed, draw_comparison
from nextscale.cli import main
from nextscale.testing import tiny_infinity


def test_a_picture_of_two_runs(tmp_path: Path) -> None:
    pipe = tiny_infinity()
    plain, fast = (ask(pipe, 1, method=method, output_type="pil") for method in (None, NOVA(t_est=5)))
    text = draw_comparison(plain, fast, "a fox", tmp_path / "x.png")
    width, height = Image.open(tmp_path / "x.png").size
    assert (width, height) == (1210, 836)
    assert f"{100 * fast.trace.share():.1f} % of the tokens" in text
    last = len(fast.trace.schedule)
    share = computed(fast.trace, 0, last)
    kept = [layer["kept"] for layer in fast.trace.to_dict()["images"][0]["scales"][-1]["layers"]]
    assert share.sum() == pytest.approx(np.mean(kept))
    stopped = ask(pipe, 1, method=Truncate(1), output_type="pil")
    assert computed(stopped.trace, 0, last).max() == 0


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: object) -> int:
        monkeypatch.setattr(sys, "argv", ["nextscale", "compare", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)

    assert run("a fox", "--method", "magic") == 2
    assert "unknown method 'magic'" in capsys.readouterr().err
    assert run("a fox", "--out", tmp_path / "x.txt") == 2
    assert run("qwertz", "--out", tmp_path / "x.png") == 2
    assert "nothing that this model can draw" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("a fox", "--out", tmp_path / "x.png") == 2
    assert "nextscale[plot]" in capsys.readouterr().err
