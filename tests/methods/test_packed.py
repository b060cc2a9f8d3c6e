"""Selections whose tokens lie packed, one row behind the other, against rows that are computed one by one.

Behind the last token are cells and numbers that mean nothing.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from support.emulated_graphs import EmulatedGraphs
from support.pipelines import ask, same_tokens
from torch import Tensor, nn

from nextscale import NOVA, DropGuidance, FastVAR, RandomSelection, SparseVAR, ToProVAR
from nextscale.kernels import residual_norm
from nextscale.kernels.residual_norm import Norm
from nextscale.kernels.split_k import SplitKPartials
from nextscale.methods.base import Method
from nextscale.methods.nova.layer_linkage import LayerLinkage
from nextscale.methods.policy import Capabilities, Policy
from nextscale.methods.selection import Packed, Selection, gather, scatter, topk_select
from nextscale.models.residual import ResidualStream
from nextscale.runtime import eager
from nextscale.runtime.eager import Eager

gpu = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
on_both = pytest.mark.parametrize("device", ["cpu", gpu])

CELLS = 7
KEPT: dict[str, list[list[int]]] = {
    "some": [[1, 2, 6], [], [0, 1, 2, 3, 4, 5, 6], [5]],
    "none": [[], []],
    "all": [list(range(CELLS))] * 2,
    "one row": [[0, 4]],
    "first": [[3], [], []],
}
some_rows = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


def mask_of(kept: list[list[int]]) -> Tensor:
    mask = torch.zeros(len(kept), CELLS, dtype=torch.bool)
    for row, cells in enumerate(kept):
        mask[row, cells] = True
    return mask


def chosen_from(kept: list[list[int]], device: str = "cpu") -> Packed:
    """As a kernel leaves it."""
    found = Packed.of_mask(mask_of(kept).to(device))
    total = int(found.start[-1])
    found.cell[total::2], found.cell[total + 1 :: 2] = -(1 << 31), (1 << 31) - 1
    return found


def rows_of(x: Tensor, kept: list[list[int]]) -> list[Tensor]:
    """The tokens of every row, of packed ones."""
    return list(x[0, : sum(map(len, kept))].split([len(cells) for cells in kept]))


@some_rows
def test_a_packed_selection(kept: list[list[int]]) -> None:
    chosen = chosen_from(kept)
    flat = [row * CELLS + cell for row, cells in enumerate(kept) for cell in cells]
    assert chosen.cell[: len(flat)].tolist() == flat
    assert len(chosen.cell) == len(kept) * CELLS
    assert chosen.start.tolist() == [sum(map(len, kept[:row])) for row in range(len(kept) + 1)]
    for row, cells in enumerate(kept):
        slots = [flat.index(row * CELLS + cell) if cell in cells else -1 for cell in range(CELLS)]
        assert chosen.slot[row].tolist() == slots
    assert {t.dtype for t in (chosen.cell, chosen.start, chosen.slot)} == {torch.int32}
    assert torch.equal(chosen.mask(CELLS), mask_of(kept))
    assert chosen.as_packed is chosen
    assert Selection(chosen.index, chosen.count).as_packed is None


@some_rows
def test_what_others_see_of_it(kept: list[list[int]]) -> None:
    """Counts, padded cells and rows, as of any selection."""
    for chosen in (chosen_from(kept), chosen_from(kept).known()):
        most = CELLS if chosen.counts is None else max(map(len, kept))
        assert chosen.most == most
        assert chosen.count.tolist() == [len(cells) for cells in kept]
        assert chosen.index.tolist() == [cells + [CELLS - 1] * (most - len(cells)) for cells in kept]
        assert chosen.real.tolist() == [[i < len(cells) for i in range(most)] for cells in kept]
        total = sum(map(len, kept))
        assert chosen.row[:total].tolist() == [row for row, cells in enumerate(kept) for _ in cells]
        assert ((chosen.row >= 0) & (chosen.row < len(kept))).all()
        x = torch.randn(len(kept), CELLS, 3)
        for found, row, cells in zip(gather(x, chosen), x, kept, strict=True):
            assert torch.equal(found[: len(cells)], row[cells])
        new = torch.randn(len(kept), most, 3)
        plain = Selection(chosen.index, chosen.count)
        assert torch.equal(scatter(x, chosen, new), scatter(x, plain, new))
    assert chosen.counts == tuple(len(cells) for cells in kept)
    assert len(chosen.cell) == total


@some_rows
@pytest.mark.parametrize("known", [False, True])
def test_packed_and_padded_tokens(kept: list[list[int]], known: bool) -> None:
    chosen = chosen_from(kept)
    chosen = chosen.known() if known else chosen
    x = torch.randn(len(kept), CELLS, 2, 3)
    packed = chosen.taken(x)
    assert packed.shape == (1, len(chosen.cell), 2, 3)
    for found, row, cells in zip(rows_of(packed, kept), x, kept, strict=True):
        assert torch.equal(found, row[cells])
    padded = chosen.padded(packed)
    assert padded.shape == (len(kept), chosen.most, 2, 3)
    for found, row, cells in zip(padded, x, kept, strict=True):
        assert torch.equal(found[: len(cells)], row[cells])
    again = chosen.packed(padded)
    assert again.shape == packed.shape
    assert all(map(torch.equal, rows_of(again, kept), rows_of(packed, kept)))


@some_rows
@pytest.mark.parametrize("known", [False, True])
def test_other_selections_from_it(kept: list[list[int]], known: bool) -> None:
    """Of fewer rows, of more of them, and behind a context."""
    chosen = chosen_from(kept)
    chosen = chosen.known() if known else chosen
    for rows in range(1, len(kept) + 1):
        few = chosen.first(rows)
        assert few.mask(CELLS).tolist() == mask_of(kept[:rows]).tolist()
        assert few.cell is chosen.cell
        assert few.count.tolist() == [len(cells) for cells in kept[:rows]]
        assert [few.index[row, : len(cells)].tolist() for row, cells in enumerate(kept[:rows])] == kept[:rows]
    assert chosen.repeated(1) is chosen
    assert chosen.behind(0) is chosen
    twice, behind = chosen.repeated(2), chosen.behind(2)
    assert twice.mask(CELLS).tolist() == mask_of(kept * 2).tolist()
    assert behind.count.tolist() == [2 + len(cells) for cells in kept]
    assert behind.mask(CELLS + 2).tolist() == [[True, True, *row] for row in mask_of(kept).tolist()]
    for more in (twice, behind):
        counts = tuple(more.count.tolist())
        assert more.counts == (counts if known else None)
        assert not known or len(more.cell) == sum(counts)


NORMS = {
    "modulated": lambda m: Norm(0.01, m[:, :, 2], m[:, :, 3], plus_one=True),
    "shared": lambda m: Norm(0.01, m[:1, :, 2], m[:1, :, 3], plus_one=True),
    "layer norm": lambda m: Norm(0.01, m[0, 0, 2], m[0, 0, 3]),
    "rms": lambda m: Norm(0.01, m[0, 0, 2], rms=True),
    "bare": lambda m: Norm(0.01),
}


@on_both
@some_rows
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize(("gated", "known"), [(False, False), (True, False), (True, True)])
@torch.no_grad()
def test_a_stream_of_packed_tokens(device: str, kept: list[list[int]], make, gated: bool, known: bool) -> None:
    """Each row has the sums and norms that it has without the others."""
    torch.manual_seed(0)
    channels, total = 16, sum(map(len, kept))
    x = torch.randn(len(kept), CELLS + 2, channels, device=device)[:, 2:]
    modulation, reader = torch.randn(len(kept), 1, 6, channels, device=device), nn.Linear(channels, 3).to(device)
    norm, gate = make(modulation), modulation[:, :, 0] if gated else None
    assert residual_norm.supports(x) == (device == "cuda")
    chosen = chosen_from(kept, device)
    chosen = chosen.known() if known else chosen
    stream = ResidualStream(x, chosen)
    alone = [ResidualStream(x[row : row + 1, cells]) for row, cells in enumerate(kept)]

    def of(vector: Tensor | None, row: int) -> Tensor | None:
        return vector if vector is None or vector.ndim == 1 or len(vector) == 1 else vector[row : row + 1]

    def agree(found: Tensor, others: list[Tensor]) -> None:
        assert found.shape == (1, len(chosen.cell), channels)
        for mine, other in zip(rows_of(found, kept), others, strict=True):
            assert torch.allclose(mine, other[0], atol=1e-5)

    def normed() -> None:
        each = [norm._replace(factor=of(norm.factor, row), term=of(norm.term, row)) for row in range(len(kept))]
        found = stream.normed(norm, reader)
        agree(found, [other.normed(mine, reader) for other, mine in zip(alone, each, strict=True)])

    agree(ResidualStream(x, chosen).sum, [other.sum for other in alone])
    normed()  # takes them out of x
    for number in range(3):
        delta = torch.randn(4, 1, len(chosen.cell), channels, device=device)
        delta[:, :, total:] = math.nan
        parts = SplitKPartials(delta, torch.randn(channels, device=device))
        stream.add(parts if number else delta[0], gate)
        deltas = rows_of(parts.total() if number else delta[0], kept)
        for row, other in enumerate(alone):
            other.add(deltas[row][None], of(gate, row))
        if number != 1:
            normed()
    agree(stream.sum, [other.sum for other in alone])
    assert stream.packed is chosen


@torch.no_grad()
def test_a_stream_of_padded_tokens() -> None:
    """Taken out of x at once, and then like any other."""
    x, chosen = torch.randn(2, CELLS, 4), Selection(torch.tensor([[1, 5], [3, 6]]), torch.tensor([2, 1]))
    stream = ResidualStream(x, chosen)
    assert stream.packed is None
    assert torch.equal(stream.sum, chosen.of(x))


@some_rows
@torch.no_grad()
def test_holes_of_packed_tokens_stay_as_they_are(kept: list[list[int]]) -> None:
    """Without kernels, `restore` is given padded tokens."""
    x, delta, gate = (
        torch.randn(len(kept), CELLS, 4),
        torch.randn(1, len(kept) * CELLS, 4),
        torch.randn(len(kept), 1, 4),
    )
    chosen = chosen_from(kept)
    stream = ResidualStream(x, chosen)
    stream.add(delta, gate)
    policy = Policy.__new__(Policy)
    policy.capabilities = Capabilities(keeps_input=True)
    ctx = SimpleNamespace(context=0, fused_logit_lens=None)
    filled = eager.restored(policy, 0, ("self",), x, chosen, stream, ctx).sum  # type: ignore[arg-type]
    deltas = rows_of(delta, kept)
    for row, cells in enumerate(kept):
        expected = x[row].clone()
        expected[cells] += gate[row] * deltas[row]
        assert torch.allclose(filled[row], expected)


METHODS: dict[str, Method] = {
    "nova": NOVA(t_est=2, alpha=0.0),
    "nova, zero": NOVA(t_est=2, alpha=0.0, cache="zero"),
    "nova, feature": NOVA(t_est=2, alpha=0.0, cache="feature"),
    "nova, attention": NOVA(t_est=2, alpha=0.0, metric="attention"),
    "nova, nothing": NOVA(t_est=2, alpha=0.0, uncomputed="nothing", probe="previous"),
    "nova, some unguided": NOVA(t_est=2, alpha=0.0) + DropGuidance(5),
    "fastvar": FastVAR(),
    "sparsevar": SparseVAR(start_scale=0.6, tau=0.92, anchor=2, similarity=0.95),
    "toprovar": ToProVAR(tau=0.45, a_max=0.9),
    "random": RandomSelection(NOVA(t_est=2, alpha=0.0)),
}


def as_kernels_choose(keep: Callable[..., Selection]) -> Callable[..., Selection]:
    """The same choice, packed: how many tokens a row has is not told."""

    def packed(*given, **more) -> Selection:
        chosen, score = keep(*given, **more), next(g for g in given if isinstance(g, Tensor))
        return Packed.of_mask(chosen.mask(score.shape[1]))

    return packed


@dataclass(frozen=True)
class FirstCells(Method):
    """At every scale, the first one too; rows keep different numbers of tokens."""

    name = "first_cells"
    summary = "For tests."

    def start(self, context):
        return FirstCellsPolicy(context)


class FirstCellsPolicy(Policy):
    def select(self, layer, group, x, ctx):
        rows, tokens = x.shape[:2]
        count = torch.tensor([max(tokens // (1 + (row + layer) % 3), 1) for row in range(rows)])
        return Selection(torch.arange(tokens).expand(rows, -1).contiguous(), count)


METHODS["every scale"] = FirstCells()


@pytest.mark.parametrize("method", METHODS)
def test_packed_tokens_through_a_whole_run(any_pipe, method: str, monkeypatch) -> None:
    """They are those that padded rows give, whoever packs them, and whether the host knows how many they are."""
    expected = ask(any_pipe, 2, method=METHODS[method], output_type="latent")
    traced = expected.trace.to_dict()["images"]
    assert any(image["row_tokens_computed"] < image["row_tokens_full"] for image in traced)
    known: list[bool] = []
    run_block = Eager.run_block

    def noted(executor, block, stream, **rest):
        known.extend([] if stream.packed is None else [stream.packed.counts is not None])
        run_block(executor, block, stream, **rest)

    def check() -> None:
        found = ask(other, 2, method=METHODS[method], output_type="latent")
        assert same_tokens(found, expected)
        assert torch.allclose(found.images, expected.images, atol=1e-4)
        kept = [[layer["kept"] for e in image["scales"] for layer in e["layers"]] for image in traced]
        images = found.trace.to_dict()["images"]
        assert kept == [[layer["kept"] for e in image["scales"] for layer in e["layers"]] for image in images]
        for image, scale in itertools.product(range(2), range(1, len(found.tokens) + 1)):
            for layer in range(1, other.backbone.depth + 1):
                assert (found.trace.kept(image, scale, layer) == expected.trace.kept(image, scale, layer)).all()

    other = copy.copy(any_pipe)
    monkeypatch.setattr(Eager, "run_block", noted)
    monkeypatch.setattr(eager, "supports_packed", lambda backbone: True)
    check()
    assert known
    assert all(known)
    monkeypatch.setattr(LayerLinkage, "keep", as_kernels_choose(LayerLinkage.keep))
    for module in ("fastvar", "random_selection", "sparsevar", "toprovar"):
        monkeypatch.setattr(f"nextscale.methods.{module}.topk_select", as_kernels_choose(topk_select))
    check()
    known.clear()
    other.executor = EmulatedGraphs()
    check()
    assert method == "every scale" or (known and not any(known))
