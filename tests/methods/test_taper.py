"""Taper: shares that cost what was asked, the cells that are uncertain, and images that take what they need."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.methods import ENTROPIES
from support.pipelines import ask

from nextscale import DropGuidance, Taper, Truncate
from nextscale.engine.entropy import token_entropy
from nextscale.engine.schedule import Schedule
from nextscale.engine.trace import Costs
from nextscale.errors import NextscaleError
from nextscale.methods import from_dict
from nextscale.methods.naming import format_method, parse_method
from nextscale.methods.taper import Price, kept_share, plan_shares
from nextscale.methods.typical_entropies import TypicalEntropies

COSTS = Costs(16, ("self", "ffn"), {"self": 4_000_000, "ffn": 8_000_000}, {"self": 2_000, "ffn": 0}, 30_000)
SQUARE = Schedule.squares((1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64))
WIDE = Schedule(((1, 2), (2, 4), (3, 6), (4, 8), (6, 12), (9, 18), (16, 32)), frame=(16, 32))


def flops(shares: list[float], rows: list[int], schedule: Schedule) -> float:
    """Cell by cell: each kept token of a scale sees the keys of all before and of its own scale."""
    total, keys = 0.0, 0.0
    for scale, share, copies in zip(schedule, shares, rows, strict=True):
        if not share:
            continue
        kept = share * scale.tokens
        keys += kept
        per_token = COSTS.per_token["self"] + COSTS.per_token["ffn"] + COSTS.per_key["self"] * keys
        total += copies * (16 * kept * per_token + scale.tokens * COSTS.head)
    return total


@pytest.mark.parametrize("schedule", [SQUARE, WIDE], ids=["square", "wide"])
@pytest.mark.parametrize(("rows", "unguided"), [(2, True), (2, False), (1, False)])
def test_shares_cost_what_the_budget_has(schedule: Schedule, rows: int, unguided: bool) -> None:
    scales = len(schedule)
    price = Price(COSTS, schedule, (rows,) * scales, unguided)
    before = [0.0] * scales
    for budget in (0.05, 0.07, 0.12, 0.25, 0.4, 0.6, 0.75):
        shares, last_alone = plan_shares(budget, price)
        assert unguided or not last_alone
        mine = [1 if last_alone and t == scales - 1 else rows for t in range(scales)]
        whole = flops([1.0] * scales, [rows] * scales, schedule)
        assert flops(shares, mine, schedule) / whole == pytest.approx(budget, rel=1e-6)
        assert shares == sorted(shares, reverse=True), "no scale is more complete than a cheaper one"
        assert all(s == 0 or s >= 0.12 - 1e-9 for s in shares)
        assert sum(shares) > sum(before) or unguided, "more money, more cells"
        before = shares
    assert plan_shares(1.0, price) == ([1.0] * scales, False)


def test_the_share_falls_by_the_same_step_from_scale_to_scale() -> None:
    assert [round(kept_share(d), 6) for d in (-1, 0, 1, 2, 7 / 3, 2.5, 3)] == [0, 0, 0.3, 0.6, 0.7, 0.8, 1]


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8])
def test_the_trace_agrees_with_the_plan(any_pipe, budget: float) -> None:
    for image in ask(any_pipe, 2, method=Taper(budget=budget)).trace.to_dict()["images"]:
        assert image["flops"] / image["flops_full"] == pytest.approx(budget, rel=0.05)


@pytest.mark.parametrize("context", [0, 11])
@pytest.mark.parametrize("sides", [(1,), (1, 2, 4), (1, 2, 3, 4, 6)], ids=len)
def test_every_budget_buys_the_first_scale_or_names_the_least(sides: tuple[int, ...], context: int) -> None:
    price = Price(replace(COSTS, context=context), Schedule.squares(sides), (2,) * len(sides), True)
    assert 0 < price.least <= 1
    for budget in np.geomspace(1e-4, 1, 200).tolist():
        if budget < price.least:
            with pytest.raises(NextscaleError, match=f"the least is {price.least:.3g}"):
                plan_shares(budget, price)
            continue
        shares, _ = plan_shares(budget, price)
        assert shares[0] == 1, "nobody knows which cells of it are uncertain"
        assert price(shares) <= budget * (1 + 1e-6)


@pytest.mark.parametrize("entropies", ["", ENTROPIES])
def test_small_budgets(var, entropies: str) -> None:
    for budget in (0.003, 0.004, 0.006, 0.01):
        image = ask(var, 2, method=Taper(budget=budget, entropies=entropies)).trace.image(0)
        first, *others = image["scales"]
        assert first["ratio"] == 0
        assert image["flops"] / image["flops_full"] <= 1.5 * budget
        assert not all(e["ran"] for e in others)


@pytest.mark.parametrize("entropies", ["", ENTROPIES])
def test_the_trace_says_what_was_planned_and_what_is_left(any_pipe, entropies: str) -> None:
    out = ask(any_pipe, 2, method=Taper(budget=0.5, entropies=entropies) + Truncate(1))
    for n, image in enumerate(out.trace.to_dict()["images"]):
        assert image["activation"]["reason"] == "budget"
        spent, policy = 0, out.trace.policy.selecting
        for e, flops in zip(image["scales"], out.trace.flops(n), strict=True):
            spent += flops
            assert e["budget_left"] == pytest.approx(0.5 - spent / image["flops_full"], abs=1e-12)
            assert e["share"] == policy.shares[e["scale"] - 1]
            thinned = bool(entropies) and 0 < e["share"] < 1
            assert e.get("threshold") == (policy.thresholds[e["scale"] - 1] if thinned else None)
            assert not e["ran"] or entropies or e["ratio"] == pytest.approx(1 - e["share"], abs=0.5 / e["tokens"])
        assert spent == image["flops"]
        assert sum(out.trace.plain_flops(n)) == image["flops_full"]
    head, *lines = out.trace.summary().splitlines()
    assert head.endswith("planned  budget left")
    assert lines[0].endswith(f"100%  {image_left(out):>11.1%}")
    assert "budget" not in ask(any_pipe, 1, method=Truncate(1)).trace.summary()


def image_left(out) -> float:
    """After the first scale."""
    return out.trace.image(0)["scales"][0]["budget_left"]


def test_the_last_scale_is_unguided_only_where_that_pays(infinity) -> None:
    def rows(method: Taper) -> list[int]:
        return [e["rows"] for e in ask(infinity, 1, method=method).trace.to_dict()["images"][0]["scales"]]

    assert rows(Taper(budget=0.55)) == [2] * 6 + [1]
    assert rows(Taper(budget=0.55, unguided=False)) == [2] * 7
    assert rows(Taper(budget=0.97)) == [2] * 7
    assert rows(Taper(budget=0.15))[-1] == 0


def test_a_budget_counts_with_the_guidance_of_the_call(infinity) -> None:
    image = ask(infinity, 1, method=Taper(budget=0.5) + DropGuidance(5)).trace.image(0)
    assert image["flops"] / image["flops_full"] < 0.45


def highest_nearby(map_: np.ndarray) -> np.ndarray:
    padded = np.pad(map_, 1, constant_values=-np.inf)
    h, w = map_.shape
    return np.max([padded[y : y + h, x : x + w] for y in range(3) for x in range(3)], axis=0)


def scores(policy, logits: list[torch.Tensor], images: int) -> list[np.ndarray]:
    """How uncertain the cells of the first thinned scale are, from the logits of the one before."""
    grids = policy.context.schedule.grids
    entropy = token_entropy(logits[policy.first - 1][:images]).float().unflatten(1, grids[policy.first - 1])
    enlarged = torch.nn.functional.interpolate(entropy[:, None], size=grids[policy.first], mode="bilinear")[:, 0]
    return [highest_nearby(map_) for map_ in enlarged.numpy()]


def test_the_cells_with_the_most_uncertain_neighbors_are_kept(infinity) -> None:
    logits = []
    out = ask(infinity, 2, method=Taper(budget=0.5), callback_on_scale_end=lambda e: logits.append(e.raw_logits))
    policy = out.trace.policy
    t = policy.first
    for image, score in enumerate(scores(policy, logits, 2)):
        kept = out.trace.kept(image, t + 1, 1)
        assert kept.sum() == round(policy.shares[t] * kept.size)
        assert score[kept].min() >= score[~kept].max() - 1e-6
        for layer in range(2, infinity.backbone.depth + 1):
            assert np.array_equal(out.trace.kept(image, t + 1, layer), kept)
    kept = np.stack([out.trace.kept(image, t + 1, 1).ravel() for image in range(2)])
    assert np.array_equal((out.tokens[t] >= 0).all(-1).numpy(), kept)


@pytest.fixture
def typical(tmp_path: Path, infinity) -> Path:
    """Half of the cells of the images below are more uncertain than the median of these."""
    scores = [2.0, 2.1, 2.2, 2.3, 2.4]
    content = {"scales": [{"at": 1.0, "quantiles": scores}], "spendings": []}
    (tmp_path / "mine.json").write_text(json.dumps(content))
    return tmp_path / "mine.json"


def test_an_uncertain_image_gets_more(infinity, typical: Path) -> None:
    logits, method = [], Taper(budget=0.5, entropies=str(typical))
    out = ask(infinity, 8, method=method, callback_on_scale_end=lambda e: logits.append(e.raw_logits))
    policy, images = out.trace.policy, out.trace.to_dict()["images"]
    spent = [image["flops"] / image["flops_full"] for image in images]
    assert max(spent) > 1.05 * min(spent)
    assert max(spent) <= 1.5 * 0.5 * 1.02
    t = policy.first
    counts = set()
    for image, score in enumerate(scores(policy, logits, 8)):
        most = round(policy.most[t] * score.size)
        counts.add(count := min(int((score > policy.thresholds[t]).sum()), most))
        assert out.trace.kept(image, t + 1, 1).sum() == count
    assert len(counts) > 1
    alone = ask(infinity, 1, method=replace(method, hard=True)).trace.to_dict()["images"][0]
    assert alone["flops"] / alone["flops_full"] == pytest.approx(0.5, rel=0.04)


def test_no_image_exceeds_the_budget_by_more_than_half(infinity, tmp_path: Path) -> None:
    """However uncertain it is, and however much must be asked for because most images need little."""
    typical = {"scales": [{"at": 1.0, "quantiles": [0.0, 0.1]}], "spendings": [{"asked": 0.5, "spent": 0.1, "ssim": 1}]}
    (tmp_path / "mine.json").write_text(json.dumps(typical))
    for budget in (0.1, 0.2, 0.4, 0.6):
        out = ask(infinity, 2, method=Taper(budget=budget, entropies=str(tmp_path / "mine.json")))
        for image in out.trace.to_dict()["images"]:
            share = image["flops"] / image["flops_full"]
            assert budget < share <= 1.5 * budget * 1.02


def test_thresholds_and_budgets_are_read_off() -> None:
    found = TypicalEntropies.read(ENTROPIES)
    assert found.threshold(0.9, 0.5) == pytest.approx(2.25)
    assert found.threshold(0.9, 0.05) == pytest.approx((3.65 + 3.9) / 2)
    assert found.threshold(0.9, 1.0) < 0, "all cells"
    assert found.asked_for(0.22) == pytest.approx(0.2)
    assert found.asked_for(0.36) == pytest.approx(0.35)
    assert found.budget_of(0.93) == pytest.approx(0.36)
    assert found.budget_of(0.98) == pytest.approx(0.75)
    assert found.budget_of(0.5) == pytest.approx(0.22), "nothing cheaper was measured"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"budget": 0.0}, r"budget must lie in \(0, 1\]"),
        ({"budget": 0.2, "quality": 0.9}, "budget and quality are two ways to ask for the same"),
        ({"budget": 0.25, "quality": 0.9, "entropies": ENTROPIES}, "budget and quality are two ways"),
        ({"quality": 0.9}, "what a quality costs is known with `entropies` only"),
        ({"entropies": "nobody"}, "unknown entropies 'nobody'; allowed: "),
    ],
)
def test_what_cannot_be_asked_for(fields: dict, sentence: str) -> None:
    with pytest.raises(NextscaleError, match=sentence):
        Taper(**fields)


def test_a_quality_instead_of_the_default_budget() -> None:
    method = Taper(quality=0.9, entropies=ENTROPIES)
    assert method.to_dict()["fields"]["budget"] is None
    assert from_dict(json.loads(json.dumps(method.to_dict()))) == method
    assert parse_method(format_method(method)) == replace(Taper(), quality=0.9, entropies=ENTROPIES) == method
    assert parse_method("taper:0.12") == Taper(budget=0.12)
    assert json.loads(json.dumps(Taper().to_dict()))["fields"]["budget"] is None
    assert from_dict(Taper(budget=0.25).to_dict()) == Taper(budget=0.25)
    with pytest.raises(NextscaleError, match="two ways to ask for the same"):
        parse_method(f"taper:0.25;quality=0.9;entropies={json.dumps(ENTROPIES)}")


DAMAGED = ("{}", "[]", '{"scales": [], "spendings": []}')
DAMAGED += ('{"scales": [{"at": 1, "quantiles": [2, 1]}], "spendings": []}',)
DAMAGED += ('{"scales": [{"at": 1, "quantiles": [1, 2]}], "spendings": [{"asked": 0.1, "spent": NaN, "ssim": 1}]}',)


@pytest.mark.parametrize("text", DAMAGED)
def test_files_that_hold_no_entropies(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(NextscaleError, match=r"mine\.json"):
        Taper(entropies=str(tmp_path / "mine.json"))


def test_the_least_budget_is_named(var) -> None:
    with pytest.raises(
        NextscaleError, match=r"a budget of 0\.0001 does not pay for the first scale; the least is 0\.0"
    ):
        var(1, method=Taper(budget=0.0001))
