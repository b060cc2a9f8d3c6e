"""SparseVAR: anchors, growing exclusion, copies and cells that add nothing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from support.pipelines import ask

from nextscale import SparseVAR


def maps(out, scales: int) -> list[np.ndarray]:
    return [out.trace.kept(0, t, 1) for t in range(1, scales + 1)]


@pytest.mark.parametrize("anchor", [2, 4])
def test_exclusion_grows_and_anchors_stay(infinity, anchor: int) -> None:
    method = SparseVAR(start_scale=0.7, tau=1.0, anchor=anchor)
    out = ask(infinity, 1, method=method, pixel_budget="0.25M")
    kept = maps(out, 10)
    assert all(m.all() for m in kept[:6])
    for t in range(6, 10):
        cells = kept[t]
        assert cells[::anchor, ::anchor].all(), "anchors are always computed"
        expected = np.zeros_like(cells)
        expected[::anchor, ::anchor] = True
        assert cells.sum() - expected.sum() <= 4, "at tau = 1 only the largest change stays"
        assert all((out.trace.kept(0, t + 1, j) == cells).all() for j in range(1, 5)), "one selection for all layers"
    for before, after in pairwise(kept[6:]):
        h, w = after.shape
        carried = before[np.ix_(np.arange(h) * before.shape[0] // h, np.arange(w) * before.shape[1] // w)]
        free = ~carried
        free[::anchor, ::anchor] = False
        assert not (after & free).any(), "an excluded cell never comes back, except as an anchor"


def test_tau_is_the_share_of_the_largest_change(infinity) -> None:
    tokens = [
        ask(infinity, 1, method=SparseVAR(start_scale=0.6, tau=tau, anchor=4)).trace.to_dict()["images"][0]
        for tau in (0.5, 0.9, 0.97, 1.0)
    ]
    computed = [t["tokens_computed"] for t in tokens]
    assert computed == sorted(computed, reverse=True)
    assert computed[-1] < computed[0] == tokens[0]["tokens_full"]


def test_copies_and_cells_that_add_nothing(infinity) -> None:
    """All cells copy at similarity -1, none can at 1: then only computed cells change the map of the last scale."""

    def last_map(similarity: float):
        features = []
        out = ask(
            infinity,
            1,
            method=SparseVAR(start_scale=1.0, tau=1.0, anchor=4, similarity=similarity),
            callback_on_scale_end=lambda e: features.append(e.features),
        )
        on_features = (features[-1] - features[-2])[0].abs().sum(0)
        return on_features > 0, out.trace.kept(0, 7, 1)

    changed, kept = last_map(-1.0)
    assert changed.all()
    changed, kept = last_map(1.0)
    assert torch.equal(changed[torch.from_numpy(kept)], torch.ones(int(kept.sum()), dtype=torch.bool))
    silent = ~changed
    assert silent.sum() > 0.5 * kept.size


def test_copied_cells_have_the_logits_of_an_anchor(infinity) -> None:
    logits = []
    out = ask(
        infinity,
        1,
        method=SparseVAR(start_scale=1.0, tau=1.0, anchor=4, similarity=-1.0),
        callback_on_scale_end=lambda e: logits.append(e.logits[0]),
    )
    kept = torch.from_numpy(out.trace.kept(0, 7, 1)).flatten()
    anchors = torch.zeros(16, 16, dtype=torch.bool)
    anchors[::4, ::4] = True
    of_anchors = logits[-1][anchors.flatten()].flatten(1)
    distance = (
        torch.cdist(logits[-1][~kept].flatten(1), of_anchors, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
    )
    assert distance.max() < 1e-4
