"""Methods written in one word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nextscale import NOVA, Truncate
from nextscale.errors import NextscaleError
from nextscale.methods import Compose, DropGuidance, FastVAR, RandomSelection, SkipVAR, SparseVAR, ToProVAR
from nextscale.methods.naming import parse_method, parse_methods


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("none", None),
        ("nova", NOVA()),
        ("nova:paper", NOVA.preset("paper")),
        ("truncate:2", Truncate(2)),
        ("toprovar:0.6", ToProVAR(tau=0.6)),
        ("dropguidance:12", DropGuidance(12)),
        ("drop_guidance:from_scale=12", DropGuidance(12)),
        ("nova:t_est=8;tau=1.5", NOVA(t_est=8, tau=1.5)),
        ("nova: 8 ; layer_linkage=False; probe = lens", NOVA(t_est=8, layer_linkage=False, probe="lens")),
        ("sparsevar:infinity", SparseVAR.preset("infinity")),
        ("fastvar:infinity", FastVAR.preset("infinity")),
        ("sparsevar:hart;tau=0.5", SparseVAR(block=0.67, tau=0.5)),
        ("random_selection:like=toprovar;seed=3", RandomSelection(ToProVAR(), 3)),
        ("nova:balanced+dropguidance:12", Compose((NOVA.preset("balanced"), DropGuidance(12)))),
    ],
)
def test_what_is_meant(text: str, method: object) -> None:
    assert parse_method(text) == method


def test_files(tmp_path: Path) -> None:
    preset, decision = tmp_path / "a=b.json", tmp_path / "d.json"
    preset.write_text(json.dumps({"name": "nova", "fields": {"alpha": 0.3}}))
    decision.write_text(json.dumps({"name": "skipvar-decision"}))
    assert parse_method(f"nova:{preset};t_est=4") == NOVA(alpha=0.3, t_est=4)
    assert parse_method(f"skipvar:{decision}") == SkipVAR(decision=str(decision))
    with pytest.raises(NextscaleError, match="is a preset of nova, not of toprovar"):
        parse_method(f"toprovar:{preset}")


def test_a_list() -> None:
    found = parse_methods("none, nova:paper,truncate:2")
    assert found == {"none": None, "nova:paper": NOVA(), "truncate:2": Truncate(2)}
    with pytest.raises(NextscaleError, match="stands twice"):
        parse_methods("nova,nova")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "unknown method ''; allowed: none, nova, toprovar"),
        ("magic", "unknown method 'magic'; allowed: none, nova, toprovar"),
        ("nova:", "'nova:' is not complete"),
        ("nova:t_est=8;", "is not complete"),
        ("nova:best", "nova has no preset 'best'; allowed: "),
        ("nova:paper;best", "'best' is not of the form field=value; fields: t_est, alpha"),
        ("nova:beta=1", "nova has no field 'beta'; allowed: t_est, alpha"),
        ("nova:tau=-1", "tau must lie in"),
        ("nova:tau=x", "tau must be a finite number"),
        ("nova:layer_linkage=perhaps", "layer_linkage must be true or false, not 'perhaps'"),
        ("truncate:2.5", "k must be a whole number, not '2.5'"),
        ("skipvar:2", "decision is none; write field=value"),
        ("random_selection:like=none", "like must be a method"),
        ("nova+none", "stands alone"),
    ],
)
def test_what_cannot_be_meant(text: str, sentence: str) -> None:
    with pytest.raises(NextscaleError) as said:
        parse_method(text)
    assert sentence in str(said.value)
