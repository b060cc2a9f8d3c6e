"""Data that comes with the package: presets, tables of ratios, fitted decisions."""

from __future__ import annotations

import pytest

from nextscale import NOVA, FastVAR, SkipVAR, ToProVAR
from nextscale.errors import NextscaleError
from nextscale.io.reading import read_json
from nextscale.methods import METHODS
from nextscale.methods.package_data import PRESETS, stored, stored_names
from nextscale.methods.skipvar import read_decision
from nextscale.methods.tables import read_table, relative_ratio
from nextscale.research.calibrate import MIN_PROMPTS
from nextscale.research.evaluate.sweep import read_sweep


def test_every_preset_can_be_read_and_says_where_it_comes_from() -> None:
    import json

    kinds = {"table", "decision", "entropies", "auto"}
    for path in PRESETS.glob("*.json"):
        kind, _, name = path.stem.partition("-")
        content = json.loads(path.read_text())
        assert {"source", "calibrated_on", "measured_on"} & set(content), path.name
        if kind in kinds:
            continue
        assert METHODS[kind].preset(name).name == kind
    assert {"balanced", "fast", "paper"} <= set(stored_names("nova"))
    measured = {method.name for method in read_sweep("methods").methods.values() if method is not None}
    for name in measured - {"random_selection", "compose"}:  # controls, not methods to use
        assert {"balanced", "fast"} <= set(stored_names(name)), name
    assert NOVA.preset("paper") == NOVA()


def test_sparsevars_shares_stand_in_for_the_scale_linkage() -> None:
    table = read_table("sparsevar")
    assert [round(13 * place) for place, _ in table] == [10, 11, 12, 13]
    assert all(0 < ratio < 1 for _, ratio in table)
    assert NOVA(scale_linkage=False, scale_table="sparsevar").scale_table == "sparsevar"


def test_a_table_written_out() -> None:
    table = read_table("12/13:0.6 1:0.75")
    assert table == ((12 / 13, 0.6), (1.0, 0.75))
    assert [relative_ratio(table, t / 13) for t in (10, 11, 12, 13)] == [0.0, 0.0, 0.6, 0.75]
    assert FastVAR(scale_table="0.5:0.1 1:0.2").scale_table == "0.5:0.1 1:0.2"


@pytest.mark.parametrize("text", ["12/13:", "a:b", "1/0:0.5", "0.5:2", "2:0.5", ":"])
def test_a_bad_table(text: str) -> None:
    with pytest.raises(NextscaleError, match="is not a scale table"):
        NOVA(scale_table=text)


def test_an_unknown_table() -> None:
    with pytest.raises(NextscaleError, match="unknown scale table 'x'; allowed: fastvar, fastvar-hart, sparsevar, or"):
        read_table("x")


def test_the_decision_for_the_embedded_model() -> None:
    skip, _ = read_decision(stored("decision", "clipart"))
    assert set(skip.classes) <= {0, 1, 2, 3}
    for preset in ("balanced", "fast"):
        assert stored("decision", SkipVAR.preset(preset).decision).is_file()


def test_toprovar_is_calibrated_for_the_embedded_model() -> None:
    assert ToProVAR.preset("clipart") != ToProVAR()
    content = read_json(stored("toprovar", "clipart"), "a preset")
    assert content["calibrated_on"] == "clipart"
    assert content["prompts"] >= MIN_PROMPTS


def test_nothing_is_called_measured_that_was_not() -> None:
    for name in stored_names("entropies"):
        assert read_json(stored("entropies", name), "entropies")["prompts"] >= MIN_PROMPTS, name
    for name in stored_names("auto"):
        assert "eval sweep" in read_json(stored("auto", name), "a method")["source"], name
