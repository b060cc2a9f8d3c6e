"""`make results`: the documents say what was measured, and no number in them is typed by hand."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from nextscale.io.reading import read_json
from nextscale.methods.naming import PLAIN
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
