"""Decisions that benchmarks play: other ones in every call, and exactly those."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support.pipelines import ask

from nextscale.methods.nova.layer_linkage import DEVIATION, LayerLinkage


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import decisions

    return decisions


def test_no_decision_comes_twice(decisions) -> None:
    recorded = decisions.read_decisions()
    assert len(recorded) == decisions.PROMPTS
    played = list(itertools.islice(decisions.vary(recorded), 192))
    assert len({(d.star, tuple(d.layers.items())) for d in played}) == 192
    assert sum(d.star is None for d in played) == 192 // decisions.NEVER
    assert {d.star - r.star for d, r in zip(played, recorded * 2, strict=True) if d.star} == set(decisions.SHIFTS)


def test_a_fixed_decision_alternates(decisions) -> None:
    means = decisions.alternating(7, 0.15, 6).means(8, 6)
    layer_stats = torch.zeros(6, 4, 1, dtype=torch.float64)
    for layer, mean in enumerate(means):
        one = torch.ones(1, dtype=torch.float64)
        LayerLinkage(True).update(mean * one, 0.5 * one, layer_stats, layer, 100)
    assert layer_stats[:, DEVIATION, 0].tolist() == pytest.approx([0, -0.15, 0.15, -0.15, 0.15, -0.15])


def test_what_is_given_is_what_is_done(decisions, infinity) -> None:
    """The layers' means are those of the file, and nothing is reduced before t*."""
    given = decisions.Decision(6, (1.0,) * 13, {7: (2.0, 1.0, 4.0, 1.0)})
    method = decisions.RecordedNOVA(t_est=5, source=itertools.repeat(given))
    image = ask(infinity, 1, method=method, pixel_budget="0.25M").trace.to_dict()["images"][0]
    for scale in image["scales"]:
        if scale["scale"] <= 6:
            assert all(layer["kept"] == scale["tokens"] for layer in scale["layers"])
        else:
            assert [layer["entropy"] for layer in scale["layers"]] == [2.0, 1.0, 4.0, 1.0]
            kept = [layer["kept"] for layer in scale["layers"]]
            assert kept[1] <= kept[0] < kept[2]
            assert kept[3] <= kept[0]
