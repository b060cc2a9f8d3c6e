"""SkipVAR: its features as the public code computes them, and what its decision does."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from support.pipelines import DATA, ask

from nextscale import SkipVAR
from nextscale.errors import NextscaleError
from nextscale.methods.skipvar import Stage, gradient_change, high_frequency_share

RECORDED = load_file(DATA / "skipvar_features.safetensors")
PAIRS = sorted({name.split(".")[0] for name in RECORDED if name.endswith(".new")})


@pytest.mark.parametrize("pair", PAIRS)
def test_features_of_the_public_code(pair: str) -> None:
    new, old = RECORDED[f"{pair}.new"], RECORDED[f"{pair}.old"]
    assert gradient_change(new, old).item() == pytest.approx(RECORDED[f"{pair}.A"].item(), abs=1e-5)
    assert high_frequency_share(new).item() == pytest.approx(RECORDED[f"{pair}.B"].item(), abs=1e-5)
    assert high_frequency_share(old).item() == pytest.approx(RECORDED[f"{pair}.B_old"].item(), abs=1e-5)


def test_features_are_per_image() -> None:
    pair = torch.cat((RECORDED["random_odd.new"], RECORDED["random_odd.old"]))
    both = high_frequency_share(pair)
    assert both[0] == high_frequency_share(pair[:1])[0]
    assert both[1] == high_frequency_share(pair[1:])[0]


def test_a_stage_chooses_the_highest_score() -> None:
    stage = Stage((0, 2), (1.0, 10.0), (2.0, 5.0), ((1.0, 0.0), (0.0, 1.0)), (0.0, 0.5))
    assert stage([1.0, 10.0]) == 2  # scores 0 and 0.5
    assert stage([3.0, 10.0]) == 0  # 1 and 0.5


def always(tmp_path, skip: int, uncond: int) -> str:
    def stage(k: int) -> dict:
        return {"classes": [k], "mean": [0, 0], "scale": [1, 1], "coef": [[0, 0]], "intercept": [0]}

    path = tmp_path / f"{skip}-{uncond}.json"
    path.write_text(json.dumps({"skip": stage(skip), "uncond": stage(uncond)}))
    return str(path)


def test_actions(infinity, tmp_path) -> None:
    def rows(skip: int, uncond: int) -> list[int]:
        out = ask(infinity, 1, method=SkipVAR(always(tmp_path, skip, uncond), at=0.5))
        return [e["rows"] for e in out.trace.to_dict()["images"][0]["scales"]]

    assert rows(0, 0) == [2] * 7
    assert rows(2, 3) == [2] * 5 + [0] * 2, "stop before the last two"
    assert rows(0, 2) == [2] * 5 + [1] * 2, "guidance off at the last two"
    assert rows(9, 0) == [2] * 4 + [0] * 3, "scales before the decision are always complete"


def test_a_decision_that_cannot_be_used(infinity, tmp_path) -> None:
    with pytest.raises(NextscaleError, match="needs a fitted decision"):
        ask(infinity, 1, method=SkipVAR())
    broken = tmp_path / "x.json"
    unfit = '{"skip": {"classes": [0], "mean": [0], "scale": [1], "coef": [[0, 0]], "intercept": [0]}}'
    for text in ("{", "{}", unfit):
        broken.write_text(text)
        with pytest.raises(NextscaleError, match="not a fitted decision"):
            ask(infinity, 1, method=SkipVAR(str(broken)))
