"""`make results`: the documents say what was measured, and no number in them is typed by hand."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from nextscale.io.reading import read_json
from nextscale.methods.naming import PLAIN, parse_methods
from nextscale.research.evaluate.presets import presets
from nextscale.research.evaluate.report import Row
from nextscale.research.evaluate.scenes import BACKGROUNDS
from nextscale.research.evaluate.statistics import ConfidenceInterval
from nextscale.research.evaluate.sweep import read_sweep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("results")


@pytest.fixture
def tables(results):
    return results.result_tables


def row(method: str, background: str, n: float) -> dict:
    estimates = ("scenes", "psnr", "ssim", "perceptual", "psnr vs truncate")
    found = {f"{key}{end}": n + k / 10 + e for k, key in enumerate(estimates) for e, end in ((0, ""), (-0.5, " low"))}
    return {**found, **{f"{key} high": found[key] + 0.5 for key in estimates}, "method": method} | {
        "background": background,
        "flops": n / 100,
        "counting": n,
    }


@pytest.fixture
def measured() -> dict:
    names = ("none", "nova:paper", "truncate:1")
    rows = [row(name, b, 10 * k + j) for k, name in enumerate(names, 1) for j, b in enumerate(("white", "full"))]
    about = {"command": "nextscale eval sweep main", "images": 540, "hardware": "abacus", "torch": "9.9"}
    return {"sweep main": {**about, "rows": rows}, "seconds": {"rows": [{"method": "nova:paper", "speed": 7.04}]}}


def test_the_documents_hold_what_was_measured(tables) -> None:
    for path, text in tables.written(read_json(ROOT / "docs" / "measured" / "embedded.json", "results"), ROOT).items():
        assert path.read_text() == text, f"python benchmarks/results.py --only documents writes {path.name}"
        assert len(re.findall("<!-- results: ", text)) == len(re.findall("<!-- end -->", text)) > 0


def test_every_table_has_its_place(tables) -> None:
    places = [name for document in tables.DOCUMENTS for name in re.findall("<!-- results: (.*) -->", _read(document))]
    assert sorted(places) == sorted(tables.TABLES)


def _read(document: str) -> str:
    return (ROOT / document).read_text()


def test_numbers_of_both_backgrounds_stand_side_by_side(tables, measured, monkeypatch) -> None:
    monkeypatch.setattr(tables, "README_METHODS", ("none", "nova:paper", "truncate:1"))
    lines = tables.readme(measured).splitlines()
    assert lines[3].split(" | ")[:2] == ["| `NOVA()`", "20.000 / 21.000"]
    assert "20.200 / 21.200 | 20.1 / 21.1 | 20.0 / 21.0 % | +20.4 (+19.9 to +20.9) / +21.4 (+20.9 to +21.9)" in lines[3]
    assert lines[3].endswith("| 7.0x |")
    assert lines[2].startswith("| `plain` | 10.000 / 11.000 | – | – | 10.0 / 11.0 % | – | – |")
    assert lines[4].endswith("| – | – |"), "truncation is not compared with itself; its seconds were not measured"
    assert lines[-1] == "540 images; abacus, torch 9.9."
    measured["sweep main"]["images"] = 24
    lines = tables.readme(measured).splitlines()
    assert "| 20.0 / 21.0 % | +20.4 / +21.4 |" in lines[3]
    assert lines[-1] == "24 images, which are too few for intervals; abacus, torch 9.9."


@pytest.fixture
def everything(tables) -> dict:
    """What a whole run leaves behind, with presets as the sweep writes them."""
    settings = {**parse_methods("nova:paper,truncate:1,taper:0.25"), "none": None}
    exact = {key: ConfidenceInterval(0.9, 0.9, 0.9) for key in ("scenes", "psnr", "ssim")}
    chosen = [Row(name, b, {**exact, "flops": 0.1, "tokens": 0.2}, {}, {}) for b in BACKGROUNDS for name in settings]
    found = presets(chosen, settings, "flops", "clipart", "here", {"nova:paper"})
    names = {*tables.README_METHODS, "nova:literal", "taper:0.12;entropies=clipart"}
    about = {"command": "nextscale eval sweep x", "images": 540, "hardware": "abacus", "torch": "9.9"}
    spread = {"flops": 0.1, "most": 0.2, "psnr": 30.0, "worst": 20.0, "dissimilarity": 0.1}
    about |= {"rows": [row(name, b, 1) for name in names for b in BACKGROUNDS], "spread": dict.fromkeys(names, spread)}
    block = {"block": 0.5, "tau": 0.1, "excluded": 0.5, "ssim": 0.9}
    calibrated = {"fields": {"tau": 0.1, "beta": 1.0, "a_max": 2.0}, "target": 0.3, "reached": 0.3, "quantile": 0.5}
    seconds = {"method": "none", "seconds": 1.0, "speed": 1.0, "tokens": 1.0}
    scales = [{"scale": 1, "mean": 1.0}, {"scale": 2, "mean": 2.0, "same_bits": 0.5, "same_bits_flat": None}]
    return {
        **{f"sweep {name}": about for name in (*tables.SWEEPS, "main", "taper")},
        "grader": {b: {"counting": {"accuracy": 1.0, "pictures": 9}} for b in BACKGROUNDS},
        "presets": {"command": "nextscale eval sweep presets", "chosen": {n[:-5]: f for n, f in found.items()}},
        "calibrations": {"toprovar": calibrated, "sparsevar": {**calibrated, "blocks": [block]}},
        "seconds": {"rows": [seconds], "threads": 2, "prompts": 4, "torch": "9.9"},
        "entropy": {"t_est": 5, "alpha": 0.5, "prompts": 9, "eta_positive": 1.0, "stars": {"6": 9}, "scales": scales},
    }


def test_a_whole_run_fills_every_place(tables, everything) -> None:
    written = "".join(tables.written(everything, ROOT).values())
    assert "`auto` is `nova:balanced` on this model, `auto:fast` is `nova:fast`." in written
    assert "| `nova:faithful` | `nova` | 10.0 / 10.0 % |" in written


def test_what_was_not_measured_is_said(tables, measured, tmp_path: Path) -> None:
    for name in tables.DOCUMENTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            f"{name}\n<!-- results: methods -->\n<!-- end -->\n<!-- results: seconds -->\n1.23\n<!-- end -->\nrest\n"
        )
    del measured["seconds"]
    for path, text in tables.written(measured, tmp_path).items():
        head, first = str(path.relative_to(tmp_path)), f"<!-- results: methods -->\n\n{tables.MISSING}\n\n<!-- end -->"
        assert text == f"{head}\n{first}\n<!-- results: seconds -->\n\n1.23\n\n<!-- end -->\nrest\n"
    (tmp_path / "README.md").write_text("<!-- results: nothing -->\n<!-- end -->")
    with pytest.raises(ValueError, match="there is no table 'nothing'; allowed: readme, "):
        tables.written(measured, tmp_path)


def test_settings_of_the_main_sweep_are_measured_once(results, monkeypatch, tmp_path: Path) -> None:
    main, methods = read_sweep("main").methods, read_sweep("methods").methods
    assert main[PLAIN] is None
    assert all(any(method == other for other in methods.values()) for method in main.values())
    asked = []
    monkeypatch.setattr(results.Results, "command", lambda self, *words, module="nextscale": asked.append(words))
    run = results.Results(tmp_path, "cpu", prompts=2)
    (first, command), (second, _) = (run.sweep(name, "white,full", None) for name in ("main", "methods"))
    assert first == second == tmp_path / "methods-2"
    assert command == "nextscale eval sweep main --cost flops --prompts 2"
    assert asked[0][:3] == ("eval", "sweep", "main")
    assert set(results.TABLES) - set(results.PARTS) == set(results.result_tables.SWEEPS)
    for name in results.PARTS:
        known = read_sweep("methods").methods.values()
        assert all(method in known for method in read_sweep(name).methods.values()), name


def test_the_readme_has_the_seconds_of_all_its_methods(tables) -> None:
    timed = importlib.import_module("embedded").METHODS.split(",")
    assert {name for name in tables.README_METHODS if name != PLAIN} <= set(timed)


def test_what_a_setting_does_to_different_images(results) -> None:
    """Lists count alike, the worst tenth is that of all images."""
    records = [{"background": "white", "flops": 0.1, "psnr": 30 + n, "ssim": 0.9} for n in range(16)]
    records += [{"background": "full", "flops": 0.2 + n / 100, "psnr": 20 + n, "ssim": 0.8} for n in range(4)]
    assert results.spread(records) == pytest.approx(
        {"flops": 0.1575, "most": 0.23, "psnr": 29.5, "worst": 20.5, "dissimilarity": 0.15}
    )


def test_a_file_of_other_weights_is_forgotten(results, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "MEASURED", tmp_path / "embedded.json")
    results.remember("weights", ["a"])
    results.remember("seconds", 1)
    results.remember("weights", ["a"])
    assert read_json(tmp_path / "embedded.json", "") == {"weights": ["a"], "seconds": 1}
    results.remember("weights", ["b"])
    assert read_json(tmp_path / "embedded.json", "") == {"weights": ["b"]}


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("archive")


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_an_archive_goes_to_another_machine(archive, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    cell = write(here / "results/abc/methods-2/cells/0000-none.json", "[1]")
    left_out = ("cells/0000-none.npy", "results.json", "cells/.0000-none.json.12345678.part", ".lock", "table.csv")
    for name in left_out:
        write(here / "results/abc/methods-2" / name)
    write(here / "results/of-other-weights/x.json")
    preset = write(here / "presets/nova-fast.json", "{}")
    path = tmp_path / "results.tar.gz"
    archive.pack(path, here / "results/abc", here, [preset, here / "never-made.png"])
    cell.write_text("[2]")
    archive.pack(path, here / "results/abc", here, [preset])
    archive.unpack(path, there / "elsewhere", "abc", there)
    files = sorted(str(p.relative_to(there)) for p in there.rglob("*") if p.is_file())
    assert files == ["elsewhere/abc/methods-2/cells/0000-none.json", "presets/nova-fast.json"]
    assert (there / files[0]).read_text() == "[2]"
    with pytest.raises(SystemExit, match=r"results\.tar\.gz is of other weights: abc, not def"):
        archive.unpack(path, there, "def", there)


@pytest.mark.parametrize("name", ["../evil", "/evil", "results/abc/../../evil"])
def test_an_archive_writes_nowhere_else(archive, name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as file:
        file.addfile(tarfile.TarInfo(name))
    with pytest.raises(SystemExit, match="is no archive of results: it holds"):
        archive.unpack(tmp_path / "x.tar.gz", tmp_path / "results", "abc", tmp_path / "root")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["x.tar.gz"]


SLOW = "import sys, time; open(sys.argv[1], 'w').write('cell'); time.sleep(60)"


@pytest.fixture
def slow(results, monkeypatch, tmp_path: Path) -> Path:
    """A command that leaves something behind, and takes longer than anybody waits."""
    write(tmp_path / "slow.py", SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(results, "MEASURED", tmp_path / "embedded.json")
    monkeypatch.setattr(results, "documents", lambda: None)
    monkeypatch.setattr(results, "pack", lambda path, folder, root, others: path.write_text(str(os.listdir(folder))))
    (tmp_path / "abc").mkdir()
    return tmp_path / "abc" / "cell"


def test_a_run_ends_when_its_time_is_over(results, slow: Path, monkeypatch) -> None:
    begun = time.monotonic()
    run = results.Results(slow.parent, "cpu", 1, archive=slow.parents[1] / "x", ends_at=begun + 3)
    monkeypatch.setitem(results.STEPS, "tables", lambda run: run.command(str(slow), module="slow"))
    monkeypatch.setitem(results.STEPS, "figures", lambda run: pytest.fail("there is no time for it"))
    with pytest.raises(SystemExit, match="the same command goes on"):
        results.work(run, ["tables", "figures"])
    assert 3 <= time.monotonic() - begun < 30
    assert run.archive.read_text() == "['cell']"


def test_an_archive_is_written_while_commands_run(results, slow: Path, monkeypatch) -> None:
    monkeypatch.setattr(results, "SAVE_EVERY", 0.5)
    run = results.Results(slow.parent, "cpu", 1, archive=slow.parents[1] / "x", ends_at=time.monotonic() + 30)

    def pack(*arguments) -> None:
        run.ends_at = -1  # before the end, which saves as well
        saved.append(os.listdir(slow.parent))

    saved: list[list[str]] = []
    monkeypatch.setattr(results, "pack", pack)
    with pytest.raises(results.Stopped):
        run.command(str(slow), module="slow")
    assert len(saved) == 1


def test_what_fails_does_not_stop_the_rest(results, tmp_path: Path) -> None:
    done = []

    def fails() -> None:
        raise subprocess.CalledProcessError(1, "x")

    run = results.Results(tmp_path, "cpu", 1, jobs=2)
    with pytest.raises(subprocess.CalledProcessError):
        run.side_by_side([fails, lambda: done.append(1), lambda: done.append(2)])
    assert done == [1, 2]


def test_a_run_that_goes_on_repeats_only_what_is_cheap(results, monkeypatch, tmp_path: Path) -> None:
    """All steps, with commands that leave behind what the real ones do."""
    asked: list[tuple[str, ...]] = []

    def command(self, *words: str, module: str = "nextscale") -> None:
        asked.append((module, *words))
        out = Path(words[next(words.index(o) + 1 for o in ("--out", "--run", "--json") if o in words)])
        if words[0] == "calibrate":
            fields = {"tau": 0.1, "beta": 1.0, "a_max": 2.0}
            blocks = [{"block": 0.5, "tau": 0.1, "excluded": 0.5, "ssim": 0.9}]
            found = {"fields": fields, "target": 0.3, "reached": 0.3, "quantile": 0.5, "prompts": 144, "blocks": blocks}
            write(out, json.dumps(found))
        elif words[0] == "eval":
            records = [{"background": b, "flops": 0.1, "psnr": 30, "ssim": 0.9} for b in ("white", "full")]
            content = {"rows": [row(name, b, 1) for name in ("none", "truncate:1") for b in ("white", "full")]}
            content |= {"run": {"hardware": "abacus", "torch": "9"}, "settings": {"pictures": 2}}
            content |= {"pictures": {"none": records, "taper:0.12": records}, "grader": {}}
            write(out / "results.json", json.dumps(content))
            write(out / "curve.png")
            write(out / "presets/nova-fast.json", "{}")
            write(out / "cells/0000-taper-1.json", "[]")
        elif words[0] == "analyze":
            write(out / "kept.png")
            write(out / "shares.png")
        elif module == "training.entropy":
            scales = {"t_est": 5, "alpha": 0.5, "prompts": 9, "eta_positive": 1, "stars": {}, "scales": [{"mean": 1.0}]}
            write(out / "entropy.json", json.dumps(scales))
            write(out / "entropy.png")
        else:
            write(out, "{}")

    for name in ("PRESETS", "DOCS"):
        monkeypatch.setattr(results, name, tmp_path / "tree")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "MEASURED", tmp_path / "tree/embedded.json")
    monkeypatch.setattr(results.Results, "command", command)
    monkeypatch.setattr(results, "documents", lambda run=None: None)
    (tmp_path / "tree").mkdir()
    steps = ["calibrations", "presets", "tables", "figures", "seconds"]
    stale = write(tmp_path / "abc/methods/cells/0000-taper-0.json")
    run = results.Results(tmp_path / "abc", "cuda", None, archive=tmp_path / "x.tar.gz", jobs=2)
    results.work(run, steps)
    assert not stale.exists(), "it was drawn with entropies of before"
    measured = read_json(tmp_path / "tree/embedded.json", "")
    assert {"calibrations", "presets", "entropy", "seconds"} < set(measured)
    assert {f"sweep {name}" for name in results.TABLES} < set(measured)
    made = {p.name for p in (tmp_path / "tree").iterdir()}
    assert {*results.FIGURES, "entropies-clipart.json", "decision-clipart-98.json", "nova-fast.json"} < made
    first, again = len(asked), results.Results(tmp_path / "abc", "cuda", None, archive=tmp_path / "x.tar.gz", jobs=2)
    results.work(again, steps)
    assert {words[1] for words in asked[first:]} == {"eval"}, "which only reads its cells"
    with tarfile.open(tmp_path / "x.tar.gz") as file:
        names = set(file.getnames())
    assert {f"tree/{name}" for name in results.FIGURES} < names
    assert {"tree/nova-fast.json", "tree/embedded.json", "results/abc/methods/cells/0000-taper-1.json"} < names
    assert not any(name.endswith("results.json") for name in names)


def test_a_step_that_fails_does_not_stop_the_next(results, monkeypatch, tmp_path: Path) -> None:
    def fails(run) -> None:
        raise subprocess.CalledProcessError(1, "x")

    done = []
    monkeypatch.setattr(results, "STEPS", {"a": fails, "b": done.append})
    run = results.Results(tmp_path, "cpu", 1)
    with pytest.raises(SystemExit, match=r"these steps failed: a$"):
        results.work(run, ["a", "b"])
    assert done == [run]


KILLED = """
import sys, types
import results
from pathlib import Path
results.Pipeline = types.SimpleNamespace(from_pretrained=lambda **options: None)
results.weights_sha256 = lambda pipe: ["abc"]
results.MEASURED = Path(sys.argv[1], "docs", "embedded.json")
results.ROOT = results.PRESETS = results.DOCS = Path(sys.argv[1])
results.documents = lambda: None
results.STEPS["tables"] = lambda run: run.command(str(run.folder / "cell"), module="slow")
sys.argv[1:] = ["--only", "tables", "--device", "cpu", "--folder", sys.argv[1] + "/results", *sys.argv[2:]]
results.main()
"""


def test_who_is_told_to_stop_saves_first(tmp_path: Path) -> None:
    write(tmp_path / "slow.py", SLOW)
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "src"), str(tmp_path)])
    archive = tmp_path / "results.tar.gz"
    command = [sys.executable, "-c", KILLED, str(tmp_path), "--archive", str(archive)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True
    ) as process:
        while not (tmp_path / "results/abc/cell").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 1
    assert said.splitlines()[-1].endswith("the same command goes on")
    with tarfile.open(archive) as file:
        assert file.getnames() == ["results/abc/cell", "docs/embedded.json"]
    write(tmp_path / "docs/embedded.json", "{}")
    (tmp_path / "results/abc/cell").unlink()
    command[-2:-2] = ["--minutes", "0"]  # reads the archive, and has no time for more
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL, check=False)
    assert (tmp_path / "results/abc/cell").read_text() == "cell"
    assert read_json(tmp_path / "docs/embedded.json", "")["weights"] == ["abc"]
