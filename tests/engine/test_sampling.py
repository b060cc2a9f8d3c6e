"""Filters, guidance and schedules against the plain definitions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from nextscale.engine.guidance import guide, guide_hidden, ramp
from nextscale.engine.rng import PerImageNoise
from nextscale.engine.sampling import MAX_PARTIAL_SORT, Sampling, keep_top, keep_top_on_device
from nextscale.engine.schedule import INFINITY_GRIDS, Schedule, infinity_schedule, infinity_schedule_for_size
from nextscale.tokenizers.vq import _PHI_OF_SCALE, phi_of_scale


def kept(logits, **options) -> list[int]:
    return keep_top(torch.tensor([logits]), **options)[0].isfinite().nonzero().flatten().tolist()


def test_top_k_keeps_ties() -> None:
    assert kept([1.0, 3.0, 2.0, 2.0, 0.0], top_k=2, top_p=0.0) == [1, 2, 3]
    assert kept([1.0, 3.0, 2.0], top_k=900, top_p=0.0) == [0, 1, 2]


def test_top_p_removes_the_tail_and_never_the_best() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().tolist()
    assert kept(logits, top_k=0, top_p=0.8) == [0, 1, 2]  # 0.1 is within the last 0.2, 0.1 + 0.15 is not
    assert kept(logits, top_k=0, top_p=0.4) == [0]
    assert kept(logits, top_k=0, top_p=0.0) == [0, 1, 2, 3]
    assert kept(logits, top_k=0, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_acts_on_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept(logits, top_k=2, top_p=0.5) == [0]  # 0.3 / 0.7 <= 0.5
    assert kept(logits, top_k=0, top_p=0.5) == [0, 1]


@pytest.mark.parametrize(("top_k", "max_top_k"), [(0, 0), (0, None), (1, 4), (3, None), (3, 4), (4, 4), (900, None)])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("values", [2, 7])
def test_filters_that_are_told_their_numbers(values: int, top_p: float, top_k: int, max_top_k: int | None) -> None:
    logits = torch.randn(3, 5, values, generator=torch.Generator().manual_seed(0))
    logits[0, 0, :] = torch.arange(values) // 2  # ties
    if top_p and values > 2:
        logits, max_top_k = logits[1:], None
    told = (torch.tensor(number, dtype=torch.float64) for number in (top_k, top_p))
    if values == 2 and top_k == 1:
        top_p = 0.0  # one is left
    assert torch.equal(keep_top_on_device(logits, *told, max_top_k), keep_top(logits, top_k, top_p))


def test_what_a_filter_max_top_k() -> None:
    def max_top_k(**options) -> int | None:
        return Sampling.make(3, guidance=(1.0,) * 3, **options).max_top_k

    assert max_top_k() == 0
    assert max_top_k(top_k=[0, 7]) == max_top_k(top_k=MAX_PARTIAL_SORT) == MAX_PARTIAL_SORT
    assert max_top_k(top_k=MAX_PARTIAL_SORT + 1) is None
    assert max_top_k(top_p=0.5) is None


def test_vars_ramp() -> None:
    assert ramp(3.0, 4) == (1.0, 2.0, 3.0, 4.0)
    assert ramp([0.0, 1.0, 2.0], 3) == (1.0, 2.0, 3.0)
    assert ramp(5.0, 1) == (1.0,)


def test_guidance_of_some_images() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0], [10.0], [30.0]])  # images 0 and 2 are guided
    guided = torch.tensor([0, 2])
    assert guide(rows, 3, guided, 2.0).flatten().tolist() == [-8.0, 2.0, -24.0]
    inside = guide_hidden(rows, 3, guided, 2.0).flatten().tolist()
    assert inside == [-8.0, 2.0, -24.0, -8.0, -24.0]
    assert torch.equal(guide_hidden(rows, 3, guided, 1.0), rows)
    assert torch.equal(guide(rows[:3], 3, None, 2.0), rows[:3])


@pytest.mark.parametrize("guided", [None, torch.tensor([0, 2])])
@pytest.mark.parametrize("weight", [1.0, 2.3])
def test_guidance_that_is_told_its_numbers(weight: float, guided: torch.Tensor | None) -> None:
    rows = torch.randn(6 if guided is None else 5, 4, generator=torch.Generator().manual_seed(0))
    w, by = (torch.tensor(number, dtype=torch.float64) for number in (weight, 1 / 0.7))
    if weight == 1:
        rows[-1] = torch.inf  # nothing of it is nothing
    assert torch.equal(guide(rows, 3, guided, w, by), guide(rows, 3, guided, weight, 1 / 0.7))
    assert torch.equal(guide(rows[:3], 3, None, w, by), guide(rows[:3], 3, None, weight, 1 / 0.7))
    assert torch.equal(guide_hidden(rows, 3, guided, w), guide_hidden(rows, 3, guided, weight))


def test_calls_that_differ_in_numbers_have_one_structure() -> None:
    def graph_key(bits: bool = False, guidance=(3.0, 3.0), **options):
        return Sampling.make(2, guidance=guidance, **options).graph_key(bits)

    usual = graph_key(top_k=5)
    assert usual == graph_key(guidance=(1.0, 4.0), temperature=0.5, top_k=[0, 9])
    for other in ({"greedy": True}, {"smooth": True}, {"guidance_layers": (-1,)}, {"guidance": (3.0, 1.0)}):
        assert graph_key(top_k=5, **other) != usual
    assert graph_key() != usual, "nothing is looked for"
    assert graph_key(top_p=0.5) != usual, "it sorts"
    assert graph_key(True, top_p=0.5) == graph_key(True, top_k=1) == graph_key(True)


def test_schedule_table() -> None:
    assert len(INFINITY_GRIDS) == 15
    for ratio, grids in INFINITY_GRIDS.items():
        assert len(grids) == 13
        h, w = grids[-1]
        assert h / w == pytest.approx(ratio, rel=0.02)
        assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(grids))
    tokens = {budget: infinity_schedule(1.0, budget).tokens for budget in ("0.06M", "0.25M", "0.60M", "1M")}
    assert tokens == {"0.06M": 521, "0.25M": 2521, "0.60M": 6425, "1M": 10521}
    assert infinity_schedule(4 / 3, "1M").last == (72, 54)
    assert infinity_schedule(2 / 3, "0.06M").frame == (52, 78)


def test_scales_know_their_place() -> None:
    scales = list(Schedule.squares((1, 2, 3)))
    assert [(s.index, s.start, s.tokens, str(s)) for s in scales] == [
        (0, 0, 1, "1x1"),
        (1, 1, 4, "2x2"),
        (2, 5, 9, "3x3"),
    ]


def test_written_down_phis_follow_the_rule() -> None:
    """Except at exact ties, which exist only for ten scales."""
    for scales, written in _PHI_OF_SCALE.items():
        ticks = [1 / 12 + i * 10 / 36 for i in range(4)]
        for k, phi in enumerate(written):
            distance = [abs(t - k / (scales - 1)) for t in ticks]
            assert distance[phi] - min(distance) < 1e-9
    assert phi_of_scale(1, 7) == (0,) * 7
    assert phi_of_scale(7, 7) == tuple(range(7))


def test_the_schedule_beyond_the_table_keeps_rows_and_columns() -> None:
    assert infinity_schedule(2.0, "4M").grids[13:] == ((135, 67), (180, 90))
    assert infinity_schedule(0.5, "4M").grids[13:] == ((67, 135), (90, 180))
    assert infinity_schedule_for_size(180 * 16, 90 * 16, 16).last == (180, 90)


def test_a_short_list_of_top_k_goes_on_with_its_last() -> None:
    made = Sampling.make(14, guidance=(1.0,) * 14, top_k=(600,) * 7 + (300,))
    assert made.top_k == (600,) * 7 + (300,) * 7
    assert Sampling.make(3, guidance=(1.0,) * 3, top_k=5).top_k == (5, 5, 5)
    assert Sampling.make(2, guidance=(1.0,) * 2, top_k=[1, 2, 3]).top_k == (1, 2)


def test_tokens_and_gumbel_noise_are_drawn_apart() -> None:
    """Else a smoothed code would follow the token that the same numbers chose."""
    draws, like = PerImageNoise([5]), torch.empty(1, 200, 16)
    race, gumbel = draws.race(like, 3, [0]), draws.gumbel(like, 3, [0])
    together = torch.stack((-race.log().flatten(), gumbel.flatten()))
    assert abs(torch.corrcoef(together)[0, 1]) < 0.1
    assert gumbel.mean() == pytest.approx(0.5772, abs=0.1)
