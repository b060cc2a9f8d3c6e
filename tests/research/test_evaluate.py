"""The scenes benchmark: grading, cells that survive a stop, tables, sweeps, tuning. Small images, real model."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support.files import DATA
from support.killing import kill_after
from typer.testing import CliRunner

from nextscale import NOVA, Pipeline, Truncate
from nextscale.cli import app
from nextscale.cluster.workers import LocalWorkers
from nextscale.errors import NextscaleError
from nextscale.io.locking import LOCK, locked
from nextscale.io.reading import read_json
from nextscale.io.writing import UNFINISHED
from nextscale.methods.naming import parse_methods
from nextscale.research.evaluate import session
from nextscale.research.evaluate.bench import EQUAL, Bench, Cell, Item, make_items
from nextscale.research.evaluate.bench import _read as read_cell
from nextscale.research.evaluate.features import why_missing
from nextscale.research.evaluate.presets import presets
from nextscale.research.evaluate.recognizer import FOLDER, Detection, load_recognizer, read_about
from nextscale.research.evaluate.report import EvaluationReport, Row, as_csv
from nextscale.research.evaluate.scenes import (
    BACKGROUNDS,
    TASKS,
    SceneObject,
    ScenePrompt,
    describe,
    first_per_task,
    read_scene_prompts,
)
from nextscale.research.evaluate.statistics import ConfidenceInterval, Resampling, at_cost, pareto
from nextscale.research.evaluate.sweep import read_sweep, sweep_names
from nextscale.research.evaluate.tune import Trial, measure, read_budget, read_space

SMALL = {"pixel_budget": "0.06M"}


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.from_pretrained(progress_bar=False)


def seen(name: str, x: float = 0.5, y: float = 0.5, color: str = "red") -> Detection:
    return Detection(name, color, x, y, 0.9, 0.9)


# The questions


def test_the_frozen_list_holds_all_tasks_and_only_known_words(pipe: Pipeline) -> None:
    scene_prompts = read_scene_prompts()
    assert [sum(a.task == t for a in scene_prompts) for t in TASKS] == [60] * 6
    assert len({(a.task, a.prompt) for a in scene_prompts}) == len(scene_prompts)
    lexicon = pipe.text_encoder.lexicon  # type: ignore[union-attr]
    assert all(not lexicon.parse(a.prompt)[1] for a in scene_prompts)
    classes = set(read_about()["classes"])
    assert {t.name for a in scene_prompts for t in a.things} <= classes
    assert first_per_task(scene_prompts, 2)[:3] == [scene_prompts[0], scene_prompts[1], scene_prompts[60]]


def test_the_lists_share_no_prompt_and_say_what_is_behind(pipe: Pipeline) -> None:
    lists = {name: read_scene_prompts(name) for name in ("white", "full", "tuning")}
    assert {name: len(found) for name, found in lists.items()} == {"white": 360, "full": 180, "tuning": 144}
    every = [a.prompt for found in lists.values() for a in found]
    assert len(set(every)) == len({(a.task, a.prompt) for found in lists.values() for a in found})
    assert read_scene_prompts("full", "white") == lists["full"] + lists["white"]
    assert Counter((a.task, a.background) for a in lists["tuning"]) == {(t, b): 12 for t in TASKS for b in BACKGROUNDS}
    assert {a.background for a in lists["white"]} == {"white"}
    assert {a.background for a in lists["full"]} == {"full"}
    lexicon = pipe.text_encoder.lexicon  # type: ignore[union-attr]
    for scene_prompt in (a for found in lists.values() for a in found):
        named = "background" in scene_prompt.prompt or any(w in scene_prompt.prompt for w in (" in ", " at "))
        assert named == (scene_prompt.background == "full"), scene_prompt
        assert not lexicon.parse(scene_prompt.prompt)[1]
    places = Counter(" ".join(a.prompt.split()[-2:]) for a in lists["full"])
    assert len(places) >= 8
    assert max(places.values()) < 30, "no background is most of them"
    with pytest.raises(NextscaleError, match="unknown list of scenes 'black'; allowed: white, full, tuning"):
        read_scene_prompts("white", "black")


def test_every_clause_of_a_question_counts() -> None:
    two = ScenePrompt("two objects", "", (SceneObject("fox"), SceneObject("car")))
    assert two.passes([seen("car"), seen("fox")])
    assert not two.passes([seen("fox")])
    assert not two.passes([seen("fox"), seen("car"), seen("car")])
    three = ScenePrompt("counting", "", (SceneObject("fox", 3),))
    assert three.passes([seen("fox")] * 3)
    assert not three.passes([seen("fox")] * 4)
    blue = ScenePrompt("colours", "", (SceneObject("heart", 1, "blue"),))
    assert blue.passes([seen("heart", color="blue")])
    assert not blue.passes([seen("heart", color="red")])


@pytest.mark.parametrize(
    ("relation", "x", "y"), [("left of", 0.2, 0.5), ("right of", 0.8, 0.5), ("above", 0.5, 0.2), ("below", 0.5, 0.8)]
)
def test_places(relation: str, x: float, y: float) -> None:
    scene_prompt = ScenePrompt("position", "", (SceneObject("fox"), SceneObject("car")), relation)
    assert scene_prompt.passes([seen("fox", x, y), seen("car")])
    assert not scene_prompt.passes([seen("fox"), seen("car", x, y)])  # exchanged
    assert not scene_prompt.passes(
        [seen("fox", 0.5 + (x - 0.5) / 5, 0.5 + (y - 0.5) / 5), seen("car")]
    )  # too near to tell
    assert not scene_prompt.passes([seen("fox", y, x), seen("car")])  # along the other axis


def test_describe() -> None:
    scene_prompt = ScenePrompt("colours", "", (SceneObject("heart", 1, "blue"),))
    assert describe([seen("heart"), seen("heart")], scene_prompt) == "2 red heart"
    assert describe([], scene_prompt) == "nothing"


# The recognizer


def test_the_recognizer_is_small_and_was_measured() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 4_000_000
    accuracy = read_about()["accuracy"]
    assert set(accuracy) == set(BACKGROUNDS)
    for tasks in accuracy.values():
        assert set(tasks) == set(TASKS)
        assert all(found["accuracy"] >= 0.97 and found["pictures"] >= 100 for found in tasks.values())
    assert session.unreliable_tasks() == []


def test_tasks_that_are_graded_badly_are_named(monkeypatch) -> None:
    accuracy = {"white": {"counting": {"accuracy": 0.99}}, "full": {"counting": {"accuracy": 0.9}}}
    monkeypatch.setattr(session, "read_about", lambda: {"accuracy": accuracy})
    assert session.unreliable_tasks() == ["counting on full backgrounds"]


def test_the_recognizer_sees_what_was_drawn(pipe: Pipeline) -> None:
    """An image of the real model; the last scales add nothing that matters here."""
    image = pipe("two foxes above a blue heart", seed=7, method=Truncate(4), output_type="pt").images * 2 - 1
    recognizer = load_recognizer()
    (found,), (nothing,) = recognizer.detect(image), recognizer.detect(torch.ones(1, 3, 512, 512))
    assert sorted(d.name for d in found) == ["fox", "fox", "heart"]
    heart = next(d for d in found if d.name == "heart")
    assert heart.color == "blue"
    assert all(d.y < heart.y for d in found if d.name == "fox")
    assert nothing == []


# Statistics


def test_a_mean_with_its_interval() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(5, 2, 300)
    noise = Resampling([str(i) for i in range(300)], ["a"] * 300)
    found = noise.mean(values)
    half = 1.96 * values.std() / math.sqrt(300)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)


def test_images_of_one_prompt_go_together() -> None:
    """Ten equal images of each prompt tell no more than one: the interval must not shrink."""
    rng = np.random.default_rng(3)
    values = rng.normal(0, 1, 50)
    once = Resampling([str(i) for i in range(50)], ["a"] * 50).mean(values)
    many = Resampling([str(i) for i in range(50)] * 10, ["a"] * 500).mean(np.tile(values, 10))
    assert many.high - many.low == pytest.approx(once.high - once.low, rel=0.15)


def test_the_score_is_the_mean_over_tasks() -> None:
    noise = Resampling(["a", "b", "c", "d"], ["one", "one", "one", "two"])
    assert noise.score([1, 1, 1, 0]).value == pytest.approx(0.5)
    assert noise.mean([1, 1, 1, 0]).value == pytest.approx(0.75)
    assert noise.score([1, 1, 1, 0]) == ConfidenceInterval(0.5, 0.5, 0.5)  # tasks are drawn within themselves


def test_all_right_is_not_certainty() -> None:
    noise = Resampling([str(i) for i in range(24)], ["a"] * 24)
    found = noise.score([1] * 24)
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.857, abs=1e-3)  # 24 of 24 by Clopper and Pearson
    twice = Resampling([str(i) for i in range(24)] * 2, ["a"] * 48).score([1] * 48)
    assert twice == found, "a second image of the same prompts is no new prompt"
    change = noise.score([0] * 24, least=-1.0)
    assert change.low == pytest.approx(-change.high)


def test_a_curve_at_another_cost() -> None:
    curve = [(4.0, np.array([4.0, 0.0])), (1.0, np.array([0.0, 2.0]))]
    found = at_cost(curve, 2.0)
    assert found is not None
    assert found.tolist() == pytest.approx([2.0, 1.0])
    assert at_cost(curve, 0.9) is None
    assert at_cost(curve, 4.1) is None
    assert at_cost(curve, 1.0).tolist() == [0.0, 2.0]  # type: ignore[union-attr]


def test_pareto() -> None:
    assert pareto({"a": (1, 1), "b": (2, 3), "c": (3, 2), "d": (2, 2), "e": (4, 4)}) == ["a", "b", "e"]


def report_of(costs: dict[str, float], qualities: dict[str, list[float]], cost: str = "seconds") -> EvaluationReport:
    scene_prompts = [ScenePrompt("a", f"p{i}", ()) for i in range(3)]
    cells = {
        name: Cell(
            [
                {"passed": q > 30, "psnr": q, "ssim": q / 100, "perceptual": 1 / q, cost: costs[name]}
                | {k: 1.0 for k in ("seconds", "flops", "tokens") if k != cost}
                for q in values
            ],
            None,
        )
        for name, values in qualities.items()
    }
    return EvaluationReport([Item(a, 0) for a in scene_prompts], cells, cost)


def test_gain_over_a_curve_at_equal_cost_is_paired() -> None:
    report = report_of(
        {"none": 8.0, "t0": 4.0, "t1": 1.0, "mine": 2.0},
        {"none": [60, 60, 60], "t0": [50, 50, 50], "t1": [20, 30, 40], "mine": [36, 41, 46]},
    )
    curve = ["none", "t0", "t1"]
    gain = report.gains("mine", curve)["psnr"]
    assert gain is not None
    assert (gain.value, gain.low, gain.high) == pytest.approx((1.0, 1.0, 1.0))  # one more on every image
    distance = report.gains("mine", curve)["perceptual"]
    assert distance is not None
    assert distance.value > 0
    assert report.gains("t1", ["none", "t0", "mine"])["psnr"] is None  # cheaper than the whole curve
    assert report.gains("none", curve)["psnr"] is None  # "equal" is no point of a curve of PSNR
    row = report.row("mine", {"t": curve})
    assert row.values["speed"] == pytest.approx(4.0)
    flat = row.flat()
    assert flat["psnr vs t"] == pytest.approx(1.0)
    assert flat["scenes"] == 1.0
    table = list(csv.DictReader(as_csv(report.rows({"t": curve})).splitlines()))
    assert [r["method"] for r in table] == ["none", "t0", "t1", "mine"]
    assert float(table[3]["psnr vs t low"]) == pytest.approx(1.0)


# The bench


def test_items_take_turns_and_share_no_seed() -> None:
    items = make_items(read_scene_prompts("white", "full"), 2)
    assert [(i.scene_prompt.background, i.scene_prompt.task) for i in items[:12]] == [
        (b, t) for b in BACKGROUNDS for t in TASKS
    ]
    assert len({i.seed for i in items}) == len(items) == 1080


def test_cells_are_kept_and_repeat_to_the_digit(pipe: Pipeline, tmp_path: Path) -> None:
    items = make_items(first_per_task(read_scene_prompts(), 1), 1)[:3]
    methods = {"none": None, "t": Truncate(1), "n": NOVA(t_est=5, alpha=0)}
    first = Bench(pipe, items, 2, tmp_path / "a", True, SMALL).run(methods, reference=True)
    assert [r["psnr"] for r in first["none"].records] == [EQUAL] * 3
    assert all(r["psnr"] < 40 and r["flops"] < 0.6 and r["seconds"] > 0 for r in first["t"].records)
    measured = ("seconds", "flops", "tokens", "psnr", "ssim")
    assert all(r[key] == float(f"{r[key]:.6g}") for r in first["t"].records for key in measured), "cells stay small"
    assert first["t"].features is not None
    assert first["t"].features.shape == (3, 1280)
    # Other seeds, so other images.
    assert not np.allclose(first["reference"].features, first["none"].features)  # type: ignore[arg-type]
    made: list[str] = []

    class Watched(Bench):
        def _draw(self, items, method):  # type: ignore[no-untyped-def]
            made.append("none" if method is None else method.name)
            return super()._draw(items, method)

    again = Watched(pipe, items, 2, tmp_path / "a", True, SMALL).run(methods, reference=True)
    assert not made, "all cells were there"
    assert [c.records for c in again.values()] == [c.records for c in first.values()]
    for file in (tmp_path / "a" / "cells").glob("*-truncate*"):
        file.unlink()
    third = Watched(pipe, items, 2, tmp_path / "a", True, SMALL).run(methods, reference=True)
    assert made == ["none", "truncate"] * 2  # the missing cells, and what each is compared with: its own batch
    without = [{k: v for k, v in r.items() if k != "seconds"} for r in third["t"].records]
    assert without == [{k: v for k, v in r.items() if k != "seconds"} for r in first["t"].records]


def test_the_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    common = ["--prompts", "1", "--pixel-budget", "0.06M", "--batch", "3", "--quiet"]
    out = tmp_path / "scenes"
    arguments = ["eval", "scenes", "--methods", "none,truncate:1", "--out", str(out), "--seeds", "1"]
    arguments += ["--lists", "white", *common]
    result = runner.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "truncate:1" in result.output
    assert "6 images of clipart on cpu, batch 3, float32" in result.output
    content = json.loads((out / "results.json").read_text())
    assert content["settings"]["model"] == "clipart"
    assert len(content["settings"]["weights_sha256"][0]) == 64
    assert len(content["pictures"]["none"]) == 6
    assert content["grader"]["white"]["counting"]["accuracy"] >= 0.97
    assert (out / "table.csv").read_text().startswith("method,background,scenes,scenes low")
    with pytest.raises(NextscaleError, match="other settings: batch is 3 there and 2 now"):
        runner.invoke(app, [*arguments[:-2], "2", "--quiet"], catch_exceptions=False)
    with pytest.raises(NextscaleError, match="unknown list of scenes 'blue'"):
        runner.invoke(app, ["eval", "scenes", "--lists", "blue", "--out", str(out)], catch_exceptions=False)
    with pytest.raises(NextscaleError, match="unknown method 'nowa'"):
        runner.invoke(app, ["eval", "scenes", "--methods", "nowa", "--out", str(out)], catch_exceptions=False)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"curves": {"truncate": ["truncate:1", "truncate:3"], "mine": ["truncate:2"]}}))
    out = tmp_path / "sweep"
    result = runner.invoke(
        app, ["eval", "sweep", str(plan), "--out", str(out), "--cost", "flops", *common], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert "PSNR vs truncate" in result.output
    table = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    pictures = json.loads((out / "results.json").read_text())["pictures"]
    for background in BACKGROUNDS:
        assert f"Pareto set in PSNR, {background} backgrounds: truncate:3" in result.output
        rows = {r["method"]: r for r in table if r["background"] == background}
        assert abs(float(rows["truncate:2"]["psnr vs truncate"])) < 10
        own = [p["psnr"] for p in pictures["truncate:2"] if p["background"] == background]
        assert len(own) == 6
        assert float(rows["truncate:2"]["psnr"]) == pytest.approx(np.mean(own))
        # Between its neighbors, and so near the line through them.
        ends = sorted(float(rows[f"truncate:{k}"]["psnr"]) for k in (1, 3))
        assert ends[0] < float(rows["truncate:2"]["psnr"]) < ends[1]
    assert (out / "curve.png").stat().st_size > 10_000
    assert Truncate.preset(str(out / "presets" / "truncate-balanced.json")).k in (1, 2, 3)
    for file in (out / "cells").glob("0003-*"):
        file.unlink()
    arguments = ["eval", "sweep", str(plan), "--out", str(out), "--cost", "flops", *common, "--so-far"]
    with locked(out):  # another process may still be drawing
        result = runner.invoke(app, arguments, catch_exceptions=False)
    assert "9 images of clipart" in result.output
    assert not list((out / "cells").glob("0003-*"))


def test_a_killed_evaluation_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["eval", "scenes", "--methods", "none,truncate:1", "--out", str(out), "--prompts", "1", "--seeds", "1"]
    command += ["--lists", "white", "--pixel-budget", "0.06M", "--quiet"]
    cells = out / "cells"
    features = why_missing() is None  # then every cell is two files
    kill_after(8 if features else 4, command, {**os.environ, "OMP_NUM_THREADS": "1"})  # settings, and then cells
    before = {p: p.stat().st_mtime_ns for p in cells.glob("*.json")}
    assert len(before) == 3, "killed in the middle"
    unfinished = [p for p in cells.iterdir() if p.suffix == UNFINISHED]
    assert len(unfinished) == 1
    assert (out / LOCK).exists()
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert all(p.stat().st_mtime_ns == t for p, t in before.items()), "nothing was made twice"
    assert len(list(cells.glob("*.json"))) == 12
    assert not unfinished[0].exists()
    assert sorted(p.name for p in out.iterdir()) == ["cells", "results.json", "settings.json", "table.csv"]


# Sweeps and tuning


def test_the_named_sweeps_can_all_be_read() -> None:
    assert "methods" in sweep_names()
    for name in sweep_names():
        sweep = read_sweep(name)
        assert "none" in sweep.methods
        assert sweep.about
    for name in ("main", "methods"):
        assert "truncate:6" in read_sweep(name).methods, "a curve reaches down to what NOVA() costs"
    assert "sparsevar:anchor=0" in read_sweep("sparsevar-table4").methods


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"curves": {"a": ["truncate:1"]}, "curve": 1},
            "unknown field 'curve'; allowed: schema, about, curves, faithful",
        ),
        ({"curves": {"a": "truncate:1"}}, "the curve 'a' must be a list of methods"),
        ({"curves": {}}, "has no curve"),
        ({"curves": {"a": ["truncate:1"]}, "faithful": ["b"]}, "'faithful' must be a list of its curves: a"),
        ({"curves": {"a": ["nova:alpha=-1"]}}, "alpha must lie in"),
        ([1], "it needs 'curves'"),
    ],
)
def test_a_bad_sweep(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(NextscaleError, match=message):
        read_sweep(str(path))


def test_presets_are_the_cheapest_settings_that_come_near_enough() -> None:
    settings = {  # cost, SSIM on white and on full backgrounds
        "truncate:1": (0.4, 0.99, 0.98),
        "truncate:2": (0.21, 0.98, 0.96),
        "truncate:3": (0.2, 0.972, 0.952),
        "truncate:4": (0.1, 0.96, 0.9),
        "nova": (0.5, 0.5, 0.4),
        "nova:literal": (0.6, 0.6, 0.3),
        "nova+truncate:1": (0.01, 0.999, 0.999),
        "none": (1, 1, 1),
    }

    def row(name: str, background: str, flops: float, ssim: float) -> Row:
        same = {key: ConfidenceInterval(ssim, ssim, ssim) for key in ("ssim", "scenes", "psnr")}
        return Row(name, background, {"flops": flops, "tokens": flops, **same}, {}, {})

    rows = [row(name, b, cost, near[n]) for n, b in enumerate(BACKGROUNDS) for name, (cost, *near) in settings.items()]
    methods = parse_methods(",".join(settings))
    found = presets(rows, methods, "flops", "clipart", "here", {"nova:literal", "truncate:1"})
    assert found["truncate-balanced.json"]["fields"] == {"k": 1}, "0.97 on both backgrounds"
    assert found["truncate-fast.json"]["fields"] == {"k": 3}
    assert found["nova-fast.json"]["measured"]["full"]["ssim"] == 0.4, "never near enough: the nearest"
    assert found["nova-faithful.json"]["fields"]["rank"] == "layer", "the other one has not all parts"
    assert found["truncate-fast.json"]["measured"]["white"]["flops"] == 0.2
    both = {f"{m}-{p}.json" for m in ("truncate", "nova") for p in ("balanced", "fast", "faithful")}
    auto = "auto-clipart.json"
    assert (found[auto]["balanced"], found[auto]["fast"]) == ("truncate:balanced", "truncate:fast"), "of all methods"
    assert set(found) == both | {auto}
    assert set(presets(rows, methods, "flops", "clipart", "here")) == {n for n in both | {auto} if "faithful" not in n}


def test_a_sweep_leaves_out_what_was_not_calibrated(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("nextscale.methods.package_data.PRESETS", tmp_path)
    fixed = ("taper:0.12", "taper:0.25", "taper:0.4")
    assert read_sweep("taper").curves["taper, fixed shares"] == fixed
    assert "taper" not in read_sweep("taper").curves
    assert caplog.messages[0].startswith("the sweep taper leaves out taper:0.12;entropies=clipart, taper:0.25;")
    (tmp_path / "entropies-clipart.json").write_text((DATA / "taper_entropies.json").read_text())
    caplog.clear()
    assert read_sweep("taper").curves["taper"] == tuple(f"{name};entropies=clipart" for name in fixed)
    assert not caplog.messages


def test_an_unknown_sweep() -> None:
    with pytest.raises(NextscaleError, match="unknown sweep 'x'; allowed: main, methods"):
        read_sweep("x")


COMMANDS = (
    ["eval", "scenes"],
    ["eval", "sweep", "methods"],
    ["tune", "nova", "--max-drop", "ssim=0.1", "--preset", "preset.json"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c[:2]))
def test_folders_are_looked_at_before_a_model_is_loaded(command: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda *args, **options: pytest.fail("it was loaded"))

    def refused(out: str, words: str) -> None:
        with pytest.raises(NextscaleError, match=words):
            CliRunner().invoke(app, [*command, "--out", out], catch_exceptions=False)

    with locked(tmp_path / "busy"):
        refused("busy", "another process .* is at work in busy; let it finish")
    Path("file").write_text("x")
    Path("full").mkdir()
    Path("full", "mine.txt").write_text("x")
    refused("file/below", "cannot write into file/below: Not a directory")
    refused("full", "full is not empty and holds no evaluation")
    Path("half").mkdir()
    Path("half", "cells").write_text("x")
    Path("half", "settings.json").write_text("{}")
    refused("half", "cannot write into half/cells: Not a directory")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    refused("new", "Permission denied")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["cells", "file", "full", "half", "mine.txt", "settings.json"]


def test_scenes_that_the_model_cannot_draw(pipe: Pipeline, tmp_path: Path, monkeypatch) -> None:
    scene_prompts = [
        ScenePrompt("single object", prompt, (SceneObject("fox"),)) for prompt in ("a fox", "a qwertz", "a 猫")
    ]
    monkeypatch.setattr("nextscale.research.evaluate.scenes.read_scene_prompts", lambda *lists: scene_prompts)
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda *args, **options: pipe)
    arguments = ["eval", "scenes", "--methods", "none,truncate:6", "--out", str(tmp_path / "out"), "--seeds", "1"]
    arguments += ["--pixel-budget", "0.06M", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "__call__", lambda *args, **options: pytest.fail("an image was made"))
        with pytest.raises(NextscaleError, match=r"single object, 'a qwertz': .* 'qwertz'.*1 more of 3 .*--skip-bad"):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(app, [*arguments, "--skip-bad"], catch_exceptions=False)
    assert "2 prompts were skipped; results.json lists them" in result.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [e["prompt"] for e in results["skipped"]["prompts"]] == ["a qwertz", "a 猫"]
    assert len(results["pictures"]["none"]) == 1


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    path = tmp_path / "0000-none.json"
    for content in ("{", "[1]", "{}", '[{"passed": true}]', "[" * 100_000):
        path.write_text(content)
        with pytest.raises(NextscaleError, match=r"0000-none\.json is damaged .*; delete it and run again"):
            read_cell(path)


def test_foreign_folder(pipe: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    bench = Bench(pipe, make_items(read_scene_prompts(), 1)[:1], 1, tmp_path, False, SMALL)
    with pytest.raises(NextscaleError, match="is not empty and holds no evaluation"):
        session.open_folder(bench)


def test_who_draws_nothing_is_not_named_as_the_one_who_drew(pipe: Pipeline, tmp_path: Path) -> None:
    """With workers the command's own device draws nothing, also when it finds everything drawn."""
    for made_by, expected in (({"device": "a worker's"}, "a worker's"), (None, "a worker's")):
        bench = Bench(pipe, [], 1, tmp_path, False, SMALL, workers=LocalWorkers(pipe))
        bench.made_by = made_by
        session.save(bench, {}, {}, [])
        assert read_json(tmp_path / session.RESULTS, "an evaluation")["run"]["device"] == expected


@pytest.mark.parametrize("entry", ["scenes", "beauty=1", "scenes=much", "scenes=-1"])
def test_a_bad_budget(entry: str) -> None:
    with pytest.raises(NextscaleError, match="--max-drop"):
        read_budget([entry])


def test_a_trial_must_keep_within_every_budget() -> None:
    trial = Trial(Truncate(1), 1.0, {"scenes": 0.02, "ssim": 0.3, "perceptual": 0.0}, {})
    assert trial.excess({"scenes": 0.02, "ssim": 0.3}) == 0
    assert trial.excess({"scenes": 0.02, "ssim": 0.1}) == pytest.approx(2)  # twice the budget beyond it
    assert trial.excess({"scenes": 0.01, "ssim": 0.3}) == pytest.approx(1)
    assert trial.excess({"scenes": 0.01, "ssim": 0.1}) == pytest.approx(2)


def test_losses_are_what_was_lost() -> None:
    """A lower score is a loss, a higher one a gain."""
    scene_prompts = [ScenePrompt("a", f"p{i}", ()) for i in range(4)]

    class Drawn:
        items = [Item(a, 0) for a in scene_prompts]

        def __init__(self, passed: list[bool]) -> None:
            self.passed = passed

        def run(self, methods: dict[str, object], show: object) -> dict[str, Cell]:
            same = {"psnr": 30.0, "ssim": 0.75, "perceptual": 0.5, "seconds": 2.0, "flops": 0.5, "tokens": 0.25}
            plain = [True, True, False, False]
            rows = {"none": plain, "tried": self.passed}
            return {name: Cell([{"passed": p, **same} for p in rows[name]], None) for name in methods}

    for passed, lost in (([True, False, False, False], 0.25), ([True] * 4, -0.5)):
        found = measure(Drawn(passed), Truncate(1), "flops", False)  # type: ignore[arg-type]
        assert found.losses == pytest.approx({"scenes": lost, "ssim": 0.25, "perceptual": 0.5})
        assert found.cost == 0.5
        assert (found.excess({"scenes": 0.1}) > 0) == (lost > 0.1)


def test_search_spaces_fit_their_methods() -> None:
    from nextscale.methods import get_method
    from nextscale.research.evaluate.tune import SPACES, suggest

    class Lowest:
        def suggest_categorical(self, name: str, values: list[object]) -> object:
            return values[0]

        def suggest_int(self, name: str, low: int, high: int, step: int = 1) -> int:
            return low

        def suggest_float(self, name: str, low: float, high: float, log: bool = False) -> float:
            return low

    for name in json.loads(SPACES.read_text()):
        assert suggest(Lowest(), get_method(name), read_space(name)).name == name
    with pytest.raises(NextscaleError, match="has no search space of skipvar"):
        read_space("skipvar")


def test_tune_finds_the_cheapest_within_the_budget(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    preset = tmp_path / "preset.json"
    space = tmp_path / "space.json"
    space.write_text(json.dumps({"truncate": {"k": {"low": 1, "high": 3}}}))
    arguments = ["tune", "truncate", "--preset", str(preset), "--out", str(tmp_path / "t"), "--prompts", "1"]
    arguments += ["--pixel-budget", "0.06M", "--batch", "3", "--trials", "8", "--cost", "flops", "--quiet"]
    arguments += ["--space", str(space), "--lists", "white"]
    result = CliRunner().invoke(app, [*arguments, "--max-drop", "ssim=0.12"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(preset.read_text())
    losses = {
        k: 1 - np.mean([r["ssim"] for r in cell.records])
        for k, cell in Bench(
            Pipeline.from_pretrained(progress_bar=False),
            make_items(first_per_task(read_scene_prompts(), 1), 1),
            3,
            tmp_path / "t",
            why_missing() is None,
            SMALL,
        )
        .run(parse_methods("none,truncate:1,truncate:2,truncate:3"))
        .items()
    }
    within = [int(k[-1]) for k, lost in losses.items() if k != "none" and lost <= 0.12]
    assert 1 <= len(within) < 3, losses
    assert content["fields"]["k"] == max(within)
    assert content["measured_on"] == "clipart"
    assert content["budget"] == {"ssim": 0.12}
    assert Truncate.preset(str(preset)) == Truncate(max(within))
    with pytest.raises(NextscaleError, match="none of 8 settings of truncate stayed within the budget"):
        CliRunner().invoke(app, [*arguments, "--max-drop", "ssim=0.0"], catch_exceptions=False)
