"""Seconds of a call: what a callback takes is not the transformer's."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from support.commands import run

import nextscale
from nextscale.engine.callback import ScaleEnd
from nextscale.testing import tiny_var


class Time:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr("nextscale.io.devices.time", clock)
    return clock


def test_callbacks_are_counted_apart(clock: Time) -> None:
    pipe = tiny_var()
    embed = pipe.backbone.embed

    def slow(*args, **options):  # once for every scale
        clock.spend(1.0)
        return embed(*args, **options)

    pipe.backbone.embed = slow
    quiet = pipe(4, seed=1).trace
    assert quiet.seconds == {"text": 0, "transformer": 8, "decode": 0, "total": 8}

    def callback(end: ScaleEnd) -> bool:
        clock.spend(10.0)
        return end.scale.index < 3

    for _ in range(2):  # the clock is kept from call to call
        heard = pipe(4, seed=1, callback_on_scale_end=callback).trace
        assert heard.seconds == {"text": 0, "transformer": 4, "callbacks": 40, "decode": 0, "total": 44}
    assert "transformer 4.00 s, callbacks 40.00 s, decode 0.00 s, total 44.00 s" in heard.summary()
    assert quiet.seconds == pipe(4, seed=1).trace.seconds


def test_previews_are_no_transformer(tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny_var()
    decode = pipe.tokenizer.decode

    def slow(*args, **options):
        clock.spend(5.0)
        return decode(*args, **options)

    pipe.tokenizer.decode = slow
    monkeypatch.setattr("nextscale.pipeline.Pipeline.from_pretrained", lambda *args, **options: pipe)
    given = ("--out", tmp_path / "a.png", "--trace", tmp_path / "t.json", "--preview", tmp_path / "scales")
    done = run("generate", "4", *given)
    assert done.returncode == 0, done.stderr
    assert "transformer 0.00 s, callbacks 40.00 s, decode 5.00 s, total 45.00 s" in done.stdout
    told = json.loads((tmp_path / "t.json").read_text())
    schema = json.loads((Path(nextscale.__file__).parent / "trace.schema.json").read_text())
    jsonschema.validate(told, schema)
    assert len(list((tmp_path / "scales").iterdir())) == 8
