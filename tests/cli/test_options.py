"""Every option of a command has a help text, and reaches what it is meant for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.commands import Recorder, run

from nextscale import MODELS
from nextscale.cli import app, complete
from nextscale.engine.schedule import EXTENDED, PIXEL_BUDGETS
from nextscale.io.devices import DTYPES
from nextscale.methods import METHODS, NOVA, Compose, SparseVAR, Truncate
from nextscale.methods.package_data import stored_names
from nextscale.runtime.registry import RUNTIMES

CLI: Any = typer.main.get_command(app)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands(CLI))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help(path: tuple[str, ...]) -> None:
    command = ALL[path]
    assert command.help
    assert [p.name for p in command.params if not p.help] == []
    done = run(*path, "--help")
    assert done.returncode == 0
    for parameter in command.params:
        assert parameter.opts[0].lstrip("-") in done.stdout.lower().replace("_", "-") or parameter.name in done.stdout


def test_extras_are_no_markup() -> None:
    assert "'nextscale[serve]'" in run("serve", "--help").stdout


class Reached(Exception):
    """As far as the test goes."""


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(images=3)
    monkeypatch.setattr("nextscale.pipeline.Pipeline", recorder)
    return recorder


def arguments(command: str, values: dict[str, Any], but: tuple[str, ...] = ()) -> list[Any]:
    """All that a command takes, so that nobody forgets a new option here."""
    given: list[Any] = []
    for parameter in ALL[command,].params:
        if parameter.name in but:
            continue
        value = values[parameter.name]
        assert value != parameter.default, f"{parameter.name} must differ from its default"
        if parameter.param_type_name == "argument":
            given.append(value)
        elif value is True:
            given.append(parameter.opts[0])
        else:
            for each in value if isinstance(value, list) else [value]:
                given += [parameter.opts[0], each]
    return given


WORKERS = ("workers", "address", "replicas", "resources")  # in test_workers.py
LOADED = {
    "model": "infinity-2b",
    "weights": "there",
    "vae": "vae.pth",
    "dtype": "float16",
    "device": "cpu",
    "revision": "v2",
}
METHOD = {"method": "nova", "preset": "balanced", "set_": ["tau=2.5", "metric=mse"]}
MEANT = NOVA(**{**vars(NOVA.preset("balanced")), "tau": 2.5, "metric": "mse"})
SAMPLED = {"guidance_scale": 2.5, "temperature": 0.75, "top_k": 77, "top_p": 0.625}


def loaded_as_asked(recorder: Recorder, **more: Any) -> None:
    kept = {k: v for k, v in LOADED.items() if k != "weights"}
    assert recorder.loaded == {"source": "there", **kept, **more}


def test_generate(recorder: Recorder, tmp_path: Path) -> None:
    asked = {"negative_prompt": "a dog", **SAMPLED, "greedy": True}
    asked |= {"height": 320, "width": 192, "aspect_ratio": 1.5, "pixel_budget": "0.25M"}
    values = {"prompt": "a fox", "seed": 41, "out": tmp_path / "a.jpg", "images": 3, "quiet": True, **asked, **METHOD}
    values |= {"text_encoder": "t5", "runtime": "graphs", "quantize": "fp8", "offload": "text", **LOADED}
    values |= {"preview": tmp_path / "scales", "trace": tmp_path / "t.json"}
    # An animation shows one image: tests/cli/test_animate.py.
    done = run("generate", *arguments("generate", values, but=("animate", "beside_plain")))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    loaded_as_asked(recorder, text_encoder="t5", runtime="graphs", quantize="fp8", offload="text", progress_bar=False)
    previews = recorder.asked.pop("callback_on_scale_end")
    assert previews.folder == tmp_path / "scales"
    assert recorder.asked == {"prompt": "a fox", "seed": 41, "num_images_per_prompt": 3, "method": MEANT, **asked}
    assert recorder.more["trace"] == tmp_path / "t.json"
    assert sorted(p.name for p in tmp_path.glob("*.jpg")) == ["a-0.jpg", "a-1.jpg", "a-2.jpg"]
    assert "a summary" in run("generate", "a fox", "--images", 3, "--out", tmp_path / "a.png").stdout


def test_export(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any, **options: Any) -> Any:
        recorder.more["read"] = (*args, *options.values())
        return plan

    def check(folder: Any, *args: Any) -> None:
        recorder.more["check"] = (folder.root, folder.shard, args[-1])

    def export(*args: Any, **options: Any) -> None:
        recorder.asked = {"work": args[1], "out": args[2], **options}
        raise Reached

    plan = type("ExportPlan", (), {"settings": lambda self: {}})()
    monkeypatch.setattr("nextscale.research.export.plan.ExportPlan.read", read)
    monkeypatch.setattr("nextscale.research.export.folder.ExportFolder.check", check)
    monkeypatch.setattr("nextscale.research.export.run.export", export)
    values = {"benchmark": "dpg", "out": tmp_path, "prompts": tmp_path / "p", "images": 5, "seed": 41, **METHOD}
    values |= {
        "shard": "2/3",
        "resume": True,
        "skip_bad": True,
        "batch": 7,
        "text_encoder": "t5",
        "quiet": True,
        **LOADED,
    }
    values |= {**SAMPLED, "smooth": True, "pixel_budget": "0.25M"}
    known = {p.name for p in ALL["export",].params}
    with pytest.raises(Reached):
        CLI(["export", *map(str, arguments("export", values, WORKERS))], standalone_mode=False)
    assert set(values) <= known
    assert recorder.more["read"] == ("dpg", tmp_path / "p", 5, 41, True)
    folder, shard, resume = recorder.more["check"]
    assert (folder, str(shard.index), str(shard.count), resume) == (tmp_path, "2", "3", True)
    loaded_as_asked(recorder, text_encoder="t5", progress_bar=False)
    seen = {"work": plan, "out": tmp_path, "method": MEANT, "batch": 7, "resume": True, "pixel_budget": "0.25M"}
    seen |= {**SAMPLED, "smooth": True, "progress_bar": False, "shard": shard}
    assert seen.items() <= recorder.asked.items()


@pytest.mark.parametrize("several", [True, False])
def test_compare(several: bool, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare_methods(pipe: Any, *args: Any, **options: Any) -> None:
        recorder.asked = {"args": args, **options}
        raise Reached

    monkeypatch.setattr("nextscale.research.analyze.runs.compare_methods", compare_methods)
    monkeypatch.setattr("nextscale.io.writing.require_writable", lambda path: recorder.more.update(json=path))
    values = {"prompt": "a fox", "seed": 41, "out": tmp_path / "new" / "a.png", "json_": tmp_path / "a.json", **LOADED}
    values |= {"aspect_ratio": 1.5, "pixel_budget": "0.25M", "methods": "nova:balanced+truncate:1,truncate:2", **METHOD}
    given = [str(a) for a in arguments("compare", values)]
    for option, count in ({"--method": 1, "--preset": 1, "--set": 2} if several else {"--methods": 1}).items():
        for _ in range(count):
            place = given.index(option)
            del given[place : place + 2]
    with pytest.raises(Reached):
        CLI(["compare", *given], standalone_mode=False)
    loaded_as_asked(recorder)
    methods: dict[str, Any] = {"method": MEANT}
    if several:
        both = Compose((NOVA.preset("balanced"), Truncate(1)))
        methods = {"nova:balanced+truncate:1": both, "truncate:2": Truncate(2)}
    assert recorder.asked == {"args": ("a fox", methods, 41), "aspect_ratio": 1.5, "pixel_budget": "0.25M"}
    assert recorder.more["json"] == tmp_path / "a.json"
    assert (tmp_path / "new").is_dir()


def test_analyze(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def study(*args: Any) -> None:
        recorder.asked["args"] = args
        raise Reached

    monkeypatch.setattr("nextscale.research.analyze.study.Study", study)
    monkeypatch.setattr("nextscale.io.writing.require_writable", lambda path: recorder.more.update(report=path))
    monkeypatch.setattr("nextscale.io.writing.require_folder", lambda path: recorder.more.update(out=path))
    monkeypatch.setattr(
        "nextscale.research.analyze.figures.get_figures", lambda text: recorder.more.update(figures=text)
    )
    (tmp_path / "p.txt").write_text("birds\ta duck\n")
    values = {"prompt": "a fox", "prompts": tmp_path / "p.txt", "out": tmp_path / "out", "figures": "kept,change"}
    values |= {"methods": "sparsevar:hart,truncate:2", "report": tmp_path / "r.html", "seed": 41, **LOADED}
    values |= {"aspect_ratio": 1.5, "pixel_budget": "0.25M", "seeds": 3}
    with pytest.raises(Reached):
        CLI(["analyze", *map(str, arguments("analyze", values))], standalone_mode=False)
    loaded_as_asked(recorder)
    _, subject, seed, prompts, seeds, methods, size = recorder.asked["args"]
    assert (subject, seed, seeds, size) == ("a fox", 41, 3, {"aspect_ratio": 1.5, "pixel_budget": "0.25M"})
    assert [p.prompt for p in prompts] == ["a duck"]
    assert methods == {"sparsevar:hart": SparseVAR.preset("hart"), "truncate:2": Truncate(2)}
    assert recorder.more == {"report": tmp_path / "r.html", "out": tmp_path / "out", "figures": "kept,change"}


def test_one_grammar_everywhere(recorder: Recorder, tmp_path: Path) -> None:
    def method(*args: object) -> Any:
        done = run("generate", "a fox", "--images", 3, "--out", tmp_path / "a.png", *args)
        assert done.returncode == 0, done.stderr
        return recorder.asked["method"]

    assert method("--method", "nova:balanced") == NOVA.preset("balanced")
    assert method("--method", "nova:balanced", "--set", "tau=2") == NOVA(**{**vars(NOVA.preset("balanced")), "tau": 2})
    assert method("--method", "nova:balanced+truncate:1") == Compose((NOVA.preset("balanced"), Truncate(1)))
    assert method("--method", "none") is None
    for words, args in {
        "--preset is for a method's bare name": ("--method", "nova:paper", "--preset", "fast"),
        "--preset and --set need --method": ("--method", "none", "--set", "tau=2"),
        "--preset and --set are for one method": ("--method", "nova+truncate", "--set", "tau=2"),
        "no preset 'best'; allowed: balanced, faithful, fast, literal, paper": ("--method", "nova:best"),
    }.items():
        done = run("generate", "a fox", "--out", tmp_path / "a.png", *args)
        assert done.returncode == 2
        assert words in done.stderr


def test_what_completion_offers() -> None:
    assert list(MODELS) == list(complete.MODELS)
    assert list(METHODS) == list(complete.METHODS)
    assert list(RUNTIMES) == list(complete.RUNTIMES)
    assert list(DTYPES) == list(complete.DTYPES)
    assert {*PIXEL_BUDGETS, EXTENDED} == set(complete.PIXEL_BUDGETS)
    assert complete.methods("no") == ["none", "nova"]
    assert complete.methods("none,nova:ba") == ["none,nova:balanced"]
    assert complete.methods("nova:fast+trun") == ["nova:fast+truncate"]
    assert complete.methods("sparsevar:") == [f"sparsevar:{name}" for name in stored_names("sparsevar")]
    assert complete.presets("ba") == ["balanced"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("nextscale gen", ["generate"]),
        ("nextscale generate --model infinity-8", ["infinity-8b", "infinity-8b-512"]),
        (
            "nextscale compare fox --method nova:",
            ["nova:balanced", "nova:faithful", "nova:fast", "nova:literal", "nova:paper"],
        ),
        ("nextscale export dpg --preset pa", ["paper"]),
        ("nextscale generate fox --pixel-b", ["--pixel-budget"]),
    ],
)
def test_completion(words: str, offered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_NEXTSCALE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    done = run()
    assert done.returncode == 0
    assert done.stdout.split() == offered


def test_the_completion_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "_NEXTSCALE_COMPLETE=complete_bash" in run("--show-completion", "bash").stdout
