"""A hand-made map for every rule: exactly the expected cells stay."""

from __future__ import annotations

import pytest
import torch

from nextscale import NOVA, FastVAR, SparseVAR, ToProVAR
from nextscale.engine.rows import Rows
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Schedule
from nextscale.methods.policy import PolicyContext, ScaleContext
from nextscale.methods.selection import Selection

SIDES = (1, 2, 3, 4, 8)
GROUP = ("self", "ffn")
MARKED = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0]]).bool()
ENLARGED = MARKED.repeat_interleave(2, 0).repeat_interleave(2, 1)


class Hand:
    """A policy on five scales, one image and one or more layers, told what to see."""

    def __init__(self, method, layers: int = 1) -> None:
        schedule, self.layers = Schedule.squares(SIDES), layers
        sampling = Sampling.make(len(schedule), guidance=(1.0,) * len(schedule))
        self.policy = method.start(PolicyContext(1, schedule, sampling, layers, GROUP))
        self.scales = list(schedule)

    def run(self, t: int, x=None, doubt=None, attention=None, change=None) -> list[torch.Tensor]:
        """The cells [h, w] that each layer keeps at scale t. Maps [h, w] of one layer, or one per layer:
        how unsure the head is of the layer's input, the entropy of its attention, what it adds."""
        scale, found = self.scales[t], []
        n = scale.tokens

        def of(maps, layer: int) -> torch.Tensor:
            maps = torch.zeros(scale.grid) if maps is None else maps
            return (maps if maps.ndim == 2 else maps[layer]).float().reshape(1, n)

        layer = 0
        # Two codes: equal logits are the greatest doubt.
        ctx = ScaleContext(scale, Rows((0,), ()), lambda *a: self._logits(of(doubt, layer)))
        self.policy.plan_scale(scale)
        x = torch.zeros(1, n, 3) if x is None else x.float().reshape(1, n, 1).expand(-1, -1, 3)
        for layer in range(self.layers):
            chosen = self.policy.select(layer, GROUP, x, ctx)
            mask = torch.ones(1, n, dtype=torch.bool) if chosen is None else chosen.mask(n)
            taken = x if chosen is None else chosen.of(x)
            on_features, seen = of(change, layer)[..., None], of(attention, layer)[..., None]
            ctx.chosen.append(dict.fromkeys(GROUP, chosen))
            ctx.attention_entropy.append((seen if chosen is None else chosen.of(seen))[..., 0])
            x = self.policy.restore(
                layer, GROUP, x, chosen, taken + (on_features if chosen is None else chosen.of(on_features)), ctx
            )
            found.append(mask.reshape(scale.grid))
        raw = self._logits(of(doubt, 0))
        self.policy.finalize(x, ctx)
        self.policy.on_logits(x, raw, raw, ctx)
        self.policy.on_report(ctx, self.policy.report(ctx))
        return found

    def _logits(self, doubt: torch.Tensor) -> torch.Tensor:
        return torch.stack((torch.zeros_like(doubt), 5 - doubt), dim=-1)


def nova(**fields) -> Hand:
    """A quarter of the last scale stays, and nothing is left out before."""
    hand = Hand(NOVA(t_est=2, alpha=0.0, scale_linkage=False, scale_table="1:0.6875", layer_linkage=False, **fields))
    for t in range(3):
        assert all(cells.all() for cells in hand.run(t))
    return hand


def test_nova_keeps_the_cells_of_highest_entropy() -> None:
    hand = nova(probe="lens", rank="layer", restore_mode="nearest")
    assert hand.run(3, doubt=~MARKED)[0].all()
    doubt = torch.zeros(8, 8)
    doubt[2, :] = doubt[6, 1:7] = doubt[7, 2:8] = 3.0
    assert torch.equal(hand.run(4, doubt=doubt)[0], doubt > 0)


@pytest.mark.parametrize("fields", [{}, {"probe": "lens"}, {"rank": "layer"}], ids=str)
def test_nova_ranks_by_the_final_entropy_of_the_scale_before(fields: dict) -> None:
    hand = nova(restore_mode="nearest", **fields)
    hand.run(3, doubt=MARKED * 2.0)
    assert torch.equal(hand.run(4, doubt=~ENLARGED)[0][ENLARGED], torch.ones(16, dtype=torch.bool))


@pytest.mark.parametrize("probe", ["lens", "previous"])
def test_nova_keeps_the_cells_whose_attention_is_narrow(probe: str) -> None:
    hand = nova(metric="attention", probe=probe, restore_mode="nearest")
    hand.run(3, attention=2.0 - MARKED * 1.0, doubt=~MARKED)
    kept = hand.run(4, doubt=~ENLARGED)[0]
    assert kept.sum() == 20
    assert kept[ENLARGED].all()


def test_nova_keeps_the_cells_that_the_layer_changed_most() -> None:
    """What counts is the change, not what comes out: everywhere else the output is larger."""
    hand = nova(metric="mse", probe="lens", restore_mode="nearest")
    hand.run(3, x=torch.where(MARKED, -2.0, 9.0), change=MARKED * 2.0 + 0.5, doubt=~MARKED)
    kept = hand.run(4, doubt=~ENLARGED)[0]
    assert kept.sum() == 20
    assert kept[ENLARGED].all()


def test_nova_drops_more_in_layers_that_are_surer_than_those_before() -> None:
    """Entropies h, 2 h and h / 2: D = 0, 1, -2/3, so that a ratio of 0.4 becomes 0.4, 0 and 2/3."""
    method = NOVA(t_est=2, alpha=0.0, scale_linkage=False, scale_table="1:0.4", probe="lens", counts="floor")
    hand = Hand(method, layers=3)
    for t in range(4):
        hand.run(t)
    one = 0.5 * torch.log(torch.tensor(2.0))  # of the greatest possible entropy
    gap = torch.linspace(0, 10, 100001, dtype=torch.float64)
    p = gap.sigmoid()
    entropy = -(p * p.log() + (1 - p) * torch.log1p(-p))
    doubts = [5 - gap[(entropy - h).abs().argmin()] for h in (one, 2 * one, one / 2)]
    found = hand.run(4, doubt=torch.stack([d.expand(8, 8) for d in doubts]))
    assert [int(cells.sum()) for cells in found] == [64 - 25, 64, 64 - 42]
    assert found[0].flatten()[: 64 - 25].all(), "of equal cells the first ones"


def toprovar(**fields) -> Hand:
    fields = {"restore_mode": "nearest", **fields}
    hand = Hand(ToProVAR(representative=0.8, scale_stage=False, a_max=1.0, **fields), layers=2)
    for t in range(3):
        assert all(cells.all() for cells in hand.run(t, attention=torch.rand(SIDES[t], SIDES[t])))
    return hand


def test_toprovar_drops_the_cells_whose_attention_is_wide() -> None:
    """Entropies 0 or twice the mean: a cell stays for certain or leaves for certain. Each layer has its own map."""
    wide = torch.arange(16).reshape(4, 4) % 2 == 0
    hand = toprovar(layer_stage=False)
    assert all(cells.all() for cells in hand.run(3, attention=torch.stack((wide * 2.0, ~wide * 3.0))))
    first, second = hand.run(4)
    large = wide.repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(first, ~large)
    assert torch.equal(second, large)


def test_toprovar_thins_detail_layers_and_leaves_global_ones() -> None:
    """A map with one direction is a global layer's; one whose singular values are equal is a detail layer's."""
    one = torch.tensor([1.0, -1, 1, -1])
    line = torch.outer(one, one)
    even = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    even = even[[1, 2, 3, 1]] * torch.tensor([[1.0], [1], [1], [-1]])  # sums to 0
    hand = toprovar(beta=5.0)
    hand.run(3, attention=torch.stack((line + 1, even + 1)))
    global_layer, detail = hand.run(4)
    assert global_layer.all()
    assert 0 < detail.sum() < 64


def test_sparsevar_leaves_out_what_the_block_hardly_changed() -> None:
    """Anchors stay wherever they are; a cell that is out stays out; the others' change is asked again."""
    hand = Hand(SparseVAR(start_scale=0.8, tau=0.5, block=1.0, anchor=4, restore_mode="nearest"), layers=2)
    third = torch.tensor([[9.0, 1, 9], [9, 9, 9], [1, 1, 9]])
    for t in range(2):
        hand.run(t)
    hand.run(2, change=torch.stack((torch.zeros(3, 3), third)))
    expected = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()
    for cells in hand.run(3, change=torch.stack((torch.full((4, 4), 7.0), MARKED * 9.0 + 1))):
        assert torch.equal(cells, expected)
    # Two marked cells were computed and changed by 10, the other computed ones by 1.
    after = (MARKED & expected).repeat_interleave(2, 0).repeat_interleave(2, 1)
    after[::4, ::4] = True
    assert after.sum() == 4 * 2 + 3
    for cells in hand.run(4):
        assert torch.equal(cells, after)


def test_sparsevar_excludes_what_lies_under_an_anchor_for_good() -> None:
    """The anchor itself is computed, but on the next grid others are anchors."""
    hand = Hand(SparseVAR(start_scale=0.8, tau=0.5, block=1.0, anchor=4, restore_mode="nearest"), layers=2)
    for t in range(2):
        hand.run(t)
    low = torch.ones(3, 3)
    low[1:, 1:] = 9
    hand.run(2, change=torch.stack((torch.zeros(3, 3), low)))
    changed = torch.zeros(4, 4)
    changed[0, 0] = 7.0
    for cells in hand.run(3, change=torch.stack((torch.zeros(4, 4), changed))):
        assert cells[0, 0]
    for cells in hand.run(4):
        assert cells[:2, :2].tolist() == [[True, False], [False, False]]


def test_fastvar_keeps_the_cells_far_from_the_mean() -> None:
    hand = Hand(FastVAR(scale_table="1:0.75", first_layer=0, last_layer=1))
    for t in range(4):
        assert hand.run(t)[0].all()
    x = torch.full((8, 8), 1.0)
    x[3, :] = 4.0
    x[:, 5] = -4.0
    x[0, 0] = 9.0
    kept = hand.run(4, x=x)[0]
    assert torch.equal(kept, x != 1.0)


def test_context_tokens_in_front_are_always_chosen() -> None:
    chosen = Selection(torch.tensor([[1, 3], [2, 3]]), torch.tensor([2, 1])).behind(2)
    expected = [[True, True, False, True, False, True], [True, True, False, False, True, False]]
    assert chosen.mask(6).tolist() == expected
