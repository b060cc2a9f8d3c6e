"""Images and tables of several runs of one prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import files
from support.files import VAR_CASE
from support.pipelines import ask

from nextscale import NOVA, Pipeline, Truncate
from nextscale.cli import main
from nextscale.errors import NextscaleError
from nextscale.methods import DropGuidance, SkipVAR
from nextscale.methods.naming import parse_methods
from nextscale.research.analyze.comparison import draw_comparison
from nextscale.research.analyze.computed import computed_overall
from nextscale.research.analyze.runs import compare_methods, require_start
from nextscale.research.analyze.sheet import amplification, difference, draw_sheet
from nextscale.research.evaluate import features
from nextscale.research.evaluate.psnr import EQUAL
from nextscale.testing import tiny_infinity, tiny_var


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return tiny_var()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    files.tokenizer(folder, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    return files.flat(folder, VAR_CASE, "mine.pth")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    def command(*args: object) -> int:
        monkeypatch.setattr(sys, "argv", ["nextscale", "compare", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)

    return command


def test_an_image_of_two_runs(tmp_path: Path) -> None:
    pipe = tiny_infinity()
    plain, fast = (ask(pipe, 1, method=method, output_type="pil") for method in (None, NOVA(t_est=5)))
    text = draw_comparison(plain, fast, "a fox", tmp_path / "x.png")
    width, height = Image.open(tmp_path / "x.png").size
    assert (width, height) == (1210, 836)
    assert f"{100 * fast.trace.share():.1f} % of the tokens" in text
    last = len(fast.trace.schedule)
    share = fast.trace.computed(0, last)
    kept = [layer["kept"] for layer in fast.trace.to_dict()["images"][0]["scales"][-1]["layers"]]
    assert share.sum() == pytest.approx(np.mean(kept))
    stopped = ask(pipe, 1, method=Truncate(1), output_type="pil")
    assert stopped.trace.computed(0, last).max() == 0


def test_the_same_numbers_for_all(pipe: Pipeline) -> None:
    methods = {"idle": Truncate(0), "truncate:2": Truncate(2), "unguided": DropGuidance(4), "none": None}
    made = {m.name: m for m in compare_methods(pipe, 4, methods, seed=139)}
    assert list(made) == ["none", "idle", "truncate:2", "unguided"]
    plain, idle, short, unguided = made.values()
    assert plain.ratio == 1
    assert plain.share == 1
    assert idle.same
    assert idle.psnr == plain.psnr == EQUAL
    assert idle.row()["same"] is True
    assert idle.ssim == pytest.approx(1)
    for a, b in zip(plain.output.tokens, short.output.tokens[:-2], strict=False):
        assert torch.equal(a, b)  # the scales that it ran, it ran with the same seed
    assert not short.same
    assert short.psnr < 60
    assert short.tokens == plain.tokens - 2 * pipe.backbone.depth * (49 + 64)
    assert short.ratio == pytest.approx(plain.seconds / short.seconds)
    assert json.loads(json.dumps(short.row()))["method"]["fields"] == {"k": 2}
    assert computed_overall(plain.output.trace) == pytest.approx(np.ones((8, 8)))
    assert computed_overall(short.output.trace) == pytest.approx(np.full((8, 8), 1 - 113 / 204))
    assert computed_overall(unguided.output.trace).min() == 1  # its conditional rows are complete


@pytest.mark.parametrize("count", [1, 6])
def test_a_sheet(count: int, pipe: Pipeline, tmp_path: Path) -> None:
    names = ["nova:t_est=3", "truncate:1", "fastvar", "sparsevar", "toprovar", "nova:t_est=3+drop_guidance:5"]
    made = compare_methods(pipe, 4, parse_methods(",".join(names[:count])))
    draw_sheet(made, 4, tmp_path / "x.png")
    width, _ = Image.open(tmp_path / "x.png").size
    assert width == 1200


def test_differences() -> None:
    black, grey = Image.new("RGB", (4, 4)), Image.new("RGB", (4, 4), (30, 0, 0))
    change = difference(black, grey)
    assert change == pytest.approx(np.full((4, 4), 10 / 255))
    assert amplification([change, change * 0]) == 16
    assert amplification([change * 25]) == 1
    assert amplification([change * 5]) == 4


def test_without_the_network(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> None:
        raise NextscaleError("not installed")

    monkeypatch.setattr(features, "network", missing)
    made = compare_methods(pipe, 4, {"truncate:1": Truncate(1)})
    assert features.why_missing() == "not installed"
    assert made[1].perceptual is None


def test_refused_before_anything_is_computed(pipe: Pipeline) -> None:
    for method, sentence in ((SkipVAR(), "needs a fitted decision"), (NOVA(t_est=7), "at least 9 scales")):
        with pytest.raises(NextscaleError, match=sentence):
            require_start(pipe, {"none": None, "first": Truncate(1), "it": method})


def test_the_command(weights: Path, tmp_path: Path, run, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "a.png", tmp_path / "a.json"
    options = ("--weights", weights, "--out", out, "--device", "cpu")
    assert run("4", *options, "--methods", "none,nova:t_est=2,truncate:1", "--json", table) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["none", "nova:t_est=2", "truncate:1"]
    assert "in this order" in text
    written = json.loads(table.read_text())
    assert [row["name"] for row in written["methods"]] == ["none", "nova:t_est=2", "truncate:1"]
    assert written["methods"][1]["method"]["fields"]["t_est"] == 2
    assert written["prompt"] == 4
    assert Image.open(out).size[0] == 1200
    assert run("4", *options, "--method", "nova", "--set", "t_est=2") == 0
    assert "% of the tokens, PSNR" in capsys.readouterr().out
    assert Image.open(out).size == (1210, 836)


def test_bad_commands(
    weights: Path, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "x.png")

    def said(*args: object) -> str:
        assert run(*args) == 2
        return capsys.readouterr().err

    assert "unknown method 'magic'" in said("a fox", *out, "--method", "magic")
    assert "unknown method 'magic'; allowed: none, auto, nova" in said("a fox", *out, "--methods", "none,magic")
    assert "names no method" in said("a fox", *out, "--methods", "none")
    assert "either --methods, or --method" in said("a fox", *out, "--methods", "nova", "--preset", "paper")
    assert "needs a fitted decision" in said("4", *out, "--weights", weights, "--methods", "truncate:1,skipvar")
    assert "takes a class number" in said("a fox", *out, "--weights", weights, "--methods", "truncate:1")
    assert "cannot write 'x.txt'" in said("a fox", "--out", tmp_path / "x.txt")
    assert "is a folder" in said("a fox", *out, "--json", tmp_path)
    assert "nothing that this model can draw" in said("qwertz", *out)
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "nextscale[plot]" in said("a fox", *out)
