"""Methods written in one word."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.pipelines import ask, same_tokens

from nextscale import NOVA, Pipeline, Truncate
from nextscale.errors import NextscaleError
from nextscale.methods import (
    METHODS,
    Compose,
    DropGuidance,
    FastVAR,
    Method,
    RandomSelection,
    SkipVAR,
    SparseVAR,
    Taper,
    ToProVAR,
)
from nextscale.methods.naming import format_method, parse_method, parse_methods


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
        ("nova:balanced+truncate:1", Compose((NOVA.preset("balanced"), Truncate(1)))),
        ("nova:balanced;tau=2 + drop-guidance + truncate:k=3", None),
        ("nova:tau=1e+1", NOVA(tau=10)),
        ("nova:tau=1e+1+truncate:2", Compose((NOVA(tau=10), Truncate(2)))),
        ("nova:scale_table=11/13:0.3 1:0.75;metric=mse", NOVA(scale_table="11/13:0.3 1:0.75", metric="mse")),
        ('nova:scale_table="11/13:0.3 1:0.75"', NOVA(scale_table="11/13:0.3 1:0.75")),
        ("random_selection:like=(nova:t_est=3;tau=2);seed=3", RandomSelection(NOVA(t_est=3, tau=2), 3)),
        ("random_selection:like=(nova:fast+truncate:1)", RandomSelection(Compose((NOVA.preset("fast"), Truncate(1))))),
    ],
)
def test_what_is_meant(text: str, method: object) -> None:
    if text.startswith("nova:balanced;"):
        method = Compose((dataclasses.replace(NOVA.preset("balanced"), tau=2), DropGuidance(), Truncate(3)))
    assert parse_method(text) == method
    assert parse_method(format_method(parse_method(text))) == method


def test_files(tmp_path: Path) -> None:
    preset, decision = tmp_path / "a=b.json", tmp_path / "d.json"
    preset.write_text(json.dumps({"name": "nova", "fields": {"alpha": 0.3}}))
    decision.write_text(json.dumps({"name": "skipvar-decision"}))
    assert parse_method(f"nova:{preset};t_est=4") == NOVA(alpha=0.3, t_est=4)
    assert parse_method(f"skipvar:{decision}") == SkipVAR(decision=str(decision))
    with pytest.raises(NextscaleError, match="is a preset of nova, not of toprovar"):
        parse_method(f"toprovar:{preset}")
    odd = tmp_path / "a+b, c;d.json"
    odd.write_text(preset.read_text())
    assert parse_method(f'nova:"{odd}";t_est=4+truncate:2') == Compose((NOVA(alpha=0.3, t_est=4), Truncate(2)))
    assert parse_method(f"nova:{odd.rename(tmp_path / 'a+b.json')}") == NOVA(alpha=0.3)
    for content in ("{}", "[]", '{"name": "nova"}', '{"name": "nova", "fields": 5}', "[" * 100_000, "\udcff", "{"):
        preset.write_text(content, errors="surrogateescape")
        with pytest.raises(NextscaleError, match="is not a stored method"):
            parse_method(f"nova:{preset}")


def test_a_list() -> None:
    found = parse_methods("none, nova:paper,truncate:2")
    assert found == {"none": None, "nova:paper": NOVA(), "truncate:2": Truncate(2)}
    with pytest.raises(NextscaleError, match="stands twice"):
        parse_methods("nova,nova")
    with pytest.raises(NextscaleError, match="has an empty place between its commas"):
        parse_methods("nova,,truncate")
    composed = parse_methods("nova:fast+truncate:1,random_selection:like=(nova:tau=2)")
    assert list(composed) == ["nova:fast+truncate:1", "random_selection:like=(nova:tau=2)"]


def anything(random: Random, depth: int = 2) -> Method:
    """A method whose fields are changed at random, within what it allows."""
    if depth and random.random() < 0.3:
        return Compose(tuple(anything(random, depth - 1) for _ in range(random.randint(2, 3))))
    method = random.choice(list(METHODS.values()))()
    for field in dataclasses.fields(method):
        now = getattr(method, field.name)
        fresh: Any = random.choice(WORDS)
        if isinstance(now, Method):
            fresh = anything(random, depth - 1) if depth else now
        elif isinstance(now, bool):
            fresh = not now
        elif isinstance(now, (int, float)):
            fresh = random.choice([0, 1, 2, 3, 12, 10**6]) if isinstance(now, int) else random.random() * 2
        if random.random() < 0.5:
            with contextlib.suppress(NextscaleError):  # not this one
                method = dataclasses.replace(method, **{field.name: fresh})
    return method


WORDS = ("mse", "nothing", "lens", "bicubic", "5", "true", "null", "a b", ' "x', "a;b+c,d:e=(f", "é\n", "[1", "\\")


def test_name_and_method_and_back() -> None:
    random, seen = Random(7), set[str]()
    for _ in range(500):
        method = anything(random)
        text = format_method(method)
        assert parse_method(text) == method, text
        assert format_method(parse_method(text)) == text
        if "," not in text:
            assert parse_methods(f"none,{text}") == {"none": None, text: method}
        seen.add(text)
    assert len(seen) > 300
    assert any("decision=" in text and "\\n" in text for text in seen)
    assert format_method(None) == "none"
    assert format_method(NOVA(t_est=8, metric="mse") + Truncate(2)) == "nova:t_est=8;metric=mse+truncate:k=2"


def test_nonsense_is_refused() -> None:
    """Whatever is written, it is a method or one sentence."""
    random, sentences = Random(11), set[str]()
    names = ["nova", "truncate", "none", "random_selection", "like", "tau", "t_est", "paper", "é"]
    alphabet = [*names, *':;=+,()[]{}" 2.-\n\0']
    for _ in range(3000):
        text = "".join(random.choice(alphabet) for _ in range(random.randint(1, 9)))
        with contextlib.suppress(NextscaleError):
            parse_method(text)
            continue
        with pytest.raises(NextscaleError) as said:
            parse_method(text)
        sentences.add(str(said.value))
    assert len(sentences) > 1000
    assert all(sentence.isprintable() for sentence in sentences)


def test_strings_in_python(var: Pipeline) -> None:
    fast = ask(var, method="nova:t_est=3+truncate:1")
    assert same_tokens(fast, ask(var, method=NOVA(t_est=3) + Truncate(1)))
    assert fast.trace.header["method"]["parts"][1] == {"name": "truncate", "fields": {"k": 1}}
    assert same_tokens(ask(var, method="none"), ask(var))
    assert var.estimate(method="truncate:2") == var.estimate()
    with pytest.raises(NextscaleError, match="unknown method 'magic'"):
        var.estimate(method="magic")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "unknown method ''; allowed: none, auto, nova, toprovar"),
        ("magic", "unknown method 'magic'; allowed: none, auto, nova, toprovar"),
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
        ("nova:paper+none", "stands alone"),
        ("nova:paper+magic:2", "unknown method 'magic'"),
        ("nova+", "unknown method ''"),
        ("nova++truncate", "unknown method ''"),
        ("+nova", "unknown method ''"),
        ("nova:tau=", "nova: tau has no value in 'tau='"),
        ("nova:=2", "nova has no field ''"),
        ("nova:t_est=3;t_est=4", "nova: t_est is set twice in 'nova:t_est=3;t_est=4'"),
        ("nova:4;t_est=4", "t_est is set twice"),
        ("nova:tau=2;paper", "'paper' is not of the form field=value"),
        ("nova:tau=[1", "is not complete: a ']' is missing"),
        ("nova:tau=(1]", "has a ']' that closes nothing"),
        ('nova:scale_table="x', "is not complete: a '\"' is missing"),
        ("nova:tau=NaN", "tau must be a finite number"),
        ("nova:t_est=" + "9" * 999, "t_est must be a whole number"),
        ("nova:t_est=null", "t_est must be a whole number"),
        ("nova:" + "x" * 1000, "has no preset"),
        ("nova:" + "x" * 3000, "is too long for a method; allowed: 2000 characters"),
        ("nova:a\0b", "has no preset 'a\\x00b'"),
        ("random_selection:like=" * 80 + "magic", "unknown method 'magic'"),
    ],
)
def test_what_cannot_be_meant(text: str, sentence: str) -> None:
    with pytest.raises(NextscaleError) as said:
        parse_method(text)
    assert sentence in str(said.value)


def test_a_bare_name_is_the_preset_measured_on_the_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="nextscale")
    assert parse_method("nova", "clipart") == NOVA.preset("balanced") != NOVA()
    assert caplog.messages == ["nova is nova:balanced, the preset that was measured on clipart"]
    assert parse_method("nova+truncate:2", "clipart") == Compose((NOVA.preset("balanced"), Truncate(2)))
    assert parse_methods("none,nova", "clipart")["nova"] == NOVA.preset("balanced")
    assert parse_method("nova", "infinity-2b") == parse_method("nova") == NOVA()
    assert parse_method("nova:t_est=8", "clipart") == NOVA(t_est=8)
    assert parse_method("truncate:2", "clipart") == Truncate(2)


def test_stored_methods_may_have_fields_that_are_gone() -> None:
    assert NOVA.from_fields({"allow_empty": False, "tau": 1.0}) == NOVA(tau=1.0)


def test_auto_is_what_was_measured_on_the_model(caplog: pytest.LogCaptureFixture, tmp_path, monkeypatch) -> None:
    caplog.set_level("INFO", logger="nextscale")
    monkeypatch.setattr("nextscale.methods.package_data.PRESETS", tmp_path)
    (tmp_path / "auto-mine.json").write_text('{"name": "auto", "balanced": "truncate:2", "fast": "truncate:3"}')
    assert parse_method("auto", "mine") == parse_method("auto:balanced", "mine") == Truncate(2)
    assert parse_method("auto:fast+drop_guidance:3", "mine") == Compose((Truncate(3), DropGuidance(3)))
    assert caplog.messages[0] == "auto is truncate:2, which was measured to be the best"
    caplog.clear()
    assert (parse_method("auto", "var-d16"), parse_method("auto:fast")) == (Taper(), Taper(budget=0.12))
    assert caplog.messages == [
        "auto is taper, for no method was measured on var-d16",
        "auto:fast is taper:0.12, for no method was measured on this model",
    ]
    with pytest.raises(NextscaleError, match=r"^auto has no level 'best'; allowed: balanced, fast$"):
        parse_method("auto:best", "mine")


def test_auto_of_the_embedded_model() -> None:
    for level in ("balanced", "fast"):
        assert isinstance(parse_method(f"auto:{level}", "clipart"), Method)
