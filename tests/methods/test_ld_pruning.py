"""LD-Pruning against its formulas in numpy: the energy of detail, how many tokens hold a share of it, guidance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.pipelines import ask

from nextscale import LDPruning, Pipeline
from nextscale.engine.schedule import Grid
from nextscale.errors import NextscaleError
from nextscale.methods.ld_pruning import detail_energy, fewest_with


def haar_energy(maps: np.ndarray) -> np.ndarray:
    """The sum of squares of the three detail bands of maps [d, h, w], [h / 2, w / 2]."""
    a, b, c, d = maps[:, ::2, ::2], maps[:, ::2, 1::2], maps[:, 1::2, ::2], maps[:, 1::2, 1::2]
    bands = [(a - b + c - d) / 2, (a + b - c - d) / 2, (a - b - c + d) / 2]
    return sum(band**2 for band in bands).sum(0)


def box_mean(energy: np.ndarray) -> np.ndarray:
    padded = np.pad(energy, 1)
    h, w = energy.shape
    return sum(padded[y : y + h, x : x + w] for y in range(3) for x in range(3)) / 9


@pytest.mark.parametrize("grid", [(8, 8), (6, 10), (5, 7)])
def test_energy(grid: Grid) -> None:
    cells = torch.randn(2, 4, *grid, generator=torch.Generator().manual_seed(1))
    change = cells.repeat_interleave(2, 2).repeat_interleave(2, 3)  # of a map with two cells a side for each of these
    even = (grid[0] + 1) // 2, (grid[1] + 1) // 2
    found = detail_energy(change, grid, even)
    for image in range(2):
        maps = np.pad(cells[image].double().numpy(), [(0, 0), (0, grid[0] % 2), (0, grid[1] % 2)], mode="edge")
        expected = box_mean(haar_energy(maps))
        np.testing.assert_allclose(found[image].numpy().reshape(even), expected, rtol=1e-4, atol=1e-5)


def test_the_fewest_tokens_that_hold_a_share() -> None:
    energy = torch.tensor([[4.0, 1.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    for share, expected in {0.4: [1, 2, 1], 0.5: [2, 2, 1], 0.7: [2, 3, 1], 0.71: [3, 3, 1], 1.0: [4, 4, 1]}.items():
        assert fewest_with(energy, share).tolist() == expected


def test_what_is_kept(infinity: Pipeline) -> None:
    """The tokens of highest energy, the same in all layers, none of scales that are left out."""
    maps = {}

    def note(end) -> None:
        maps[end.scale.index] = end.features.clone()

    method = LDPruning(rho=0.3, delta=0, scales=3, skip=1)
    out = ask(infinity, 2, method=method, callback_on_scale_end=note)
    grids = [scale.grid for scale in out.trace.schedule]
    scales = len(grids)
    for t in (scales - 3, scales - 2):
        energy = detail_energy(maps[t - 1] - maps[t - 2], grids[t - 1], grids[t])
        for image in range(2):
            n = int(fewest_with(energy, 0.3)[image])
            expected = np.zeros(energy.shape[1], bool)
            expected[np.argsort(-energy[image].numpy(), kind="stable")[:n]] = True
            for layer in (1, infinity.backbone.depth):
                assert np.array_equal(out.trace.kept(image, scale=t + 1, layer=layer).ravel(), expected)
    assert out.trace.to_dict()["images"][0]["scales"][-1]["ran"] is False


def test_guidance_ends_when_its_branches_keep_their_distance(infinity: Pipeline) -> None:
    def distances(method) -> tuple[list[float], list[int]]:
        found, rows = [], []

        def note(end) -> None:
            raw = end.raw_logits.float()
            rows.append(len(raw))
            if len(raw) == 2:
                found.append((raw[0] - raw[1]).square().mean().sqrt().item())

        ask(infinity, 1, method=method, callback_on_scale_end=note)
        return found, rows

    plain, rows = distances(LDPruning(scales=0, delta=0))
    scales = len(rows)
    assert rows == [2] * scales
    growth = {t: abs(plain[t] - plain[t - 1]) / plain[t - 1] for t in range(scales - 4, scales)}
    for delta in (0.5 * min(growth.values()), 1.01 * growth[scales - 3], 1.01 * max(growth.values())):
        ends = next((t for t, g in growth.items() if g < delta), scales)
        assert distances(LDPruning(scales=0, delta=delta))[1] == [2 if t <= ends else 1 for t in range(scales)]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rho": 0}, r"rho must lie in \(0, 1\], not 0"),
        ({"delta": -1}, r"delta must lie in \[0, 1000\]"),
        ({"skip": 4}, "skip = 4 must not exceed scales = 3"),
        ({"scales": 2.5}, "scales must be"),
    ],
)
def test_fields(fields, sentence: str) -> None:
    with pytest.raises(NextscaleError, match=sentence):
        LDPruning(**fields)


def test_a_complete_scale_must_be_left(infinity: Pipeline) -> None:
    with pytest.raises(NextscaleError, match="leaves no complete scale of a schedule of"):
        ask(infinity, 1, method=LDPruning(scales=100))


def test_a_single_complete_scale_is_enough(infinity: Pipeline) -> None:
    scales = len(ask(infinity, 1).trace.schedule)
    trace = ask(infinity, 1, method=LDPruning(scales=scales - 1)).trace
    assert all(trace.kept(0, scale=scale, layer=1).any() for scale in range(1, scales + 1))
