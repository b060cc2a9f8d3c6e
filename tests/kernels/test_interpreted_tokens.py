"""Kernels that work on tokens, in Triton's interpreter against plain numpy: choosing, summing, norming, putting back.

Counts of 0 and 1, one more than a block, odd widths; what lies behind the last token, and all else that nobody may
read, is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from support.fences import fenced, fences, some, some_tokens, whole
from support.plain import Array, close, close_fp8, gelu, highest, layer_norm, plain, resized_tokens
from torch import Tensor

from nextscale.kernels import occupancy
from nextscale.kernels.fp8 import FP8_DTYPE, InputFormat
from nextscale.kernels.residual_norm import Norm
from nextscale.kernels.split_k import SplitKPartials
from nextscale.kernels.triton import residual_norm as residual_norm_kernels
from nextscale.kernels.triton import restore as restore_kernels
from nextscale.kernels.triton import topk as topk_kernels
from nextscale.kernels.triton.fp8 import BLOCK, fused_cast
from nextscale.kernels.triton.linear_small import fused_split_k
from nextscale.kernels.triton.pinned_copy import fused_copy
from nextscale.kernels.triton.topk import fused_link_and_select, fused_select
from nextscale.methods.nova.layer_linkage import LayerLinkage
from nextscale.methods.selection import Packed
from nextscale.models.residual import ResidualStream


@pytest.fixture(autouse=True)
def _fences(request, monkeypatch) -> Iterator[None]:
    with fences(request.node.name, monkeypatch):
        yield


@pytest.fixture
def on(monkeypatch) -> Callable[[int], None]:
    """On a GPU of so many SMs."""
    return lambda count: monkeypatch.setattr(occupancy, "num_sms", lambda device: count)


def selected(cell: Tensor, start: Tensor, slot: Tensor, score: Tensor, counts: list[int], copies: int) -> None:
    cells, at = score.shape[1], 0
    rows = [highest(row, n) for row, n in zip(score, counts, strict=True)] * copies
    assert cell.shape == (len(rows) * cells,)
    assert slot.shape == (len(rows), cells)
    assert start.tolist() == [sum(map(len, rows[:row])) for row in range(len(rows) + 1)]
    assert {t.dtype for t in (cell, start, slot)} == {torch.int32}
    for row, kept in enumerate(rows):
        assert cell[at : at + len(kept)].tolist() == [row * cells + i for i in kept]
        assert slot[row].tolist() == [at + kept.index(i) if i in kept else -1 for i in range(cells)]
        at += len(kept)
    assert (cell[at:] == 77).all(), "what lies behind is left alone"


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("cells", [1, 17, 64, 65, 100])
def test_select(monkeypatch, cells: int, copies: int) -> None:
    monkeypatch.setattr(topk_kernels, "BLOCK", 32)
    score = some(6, cells)
    score[1] = 3.5  # all are equal
    score[2, ::3] = -0.0
    score[2, 1::3] = 0.0
    score[3, cells // 2] = math.inf
    score[3, 0] = -math.inf
    score[4, cells // 3 :] = score[4, 0]  # ties
    counts = [0, 1, cells // 2 + 1, cells // 2, cells // 2, cells]
    selected(*fused_select(score, whole(*counts), copies), score, counts, copies)
    for image, count in enumerate(counts):
        alone = fenced(score[image : image + 1])
        selected(*fused_select(alone, whole(count), copies), alone, [count], copies)


@pytest.mark.parametrize("rule", [LayerLinkage(True), LayerLinkage(True, 1, 0.3), LayerLinkage(False, rounds=False)])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("ratio", "copies"), [([0.6, 0.0, 0.999], 2), ([0.6], 2), ([1.0, 0.3], 1), ([0.4], 1)])
def test_link_and_select(rule: LayerLinkage, known: bool, ratio: list[float], copies: int) -> None:
    """The ratio of a layer from its entropy and those of the layers before, then the cells."""
    images, cells = len(ratio), 33
    notes = fenced(torch.full((5, 4, images), math.nan, dtype=torch.float64))
    means: list[Array] = []
    for layer in range(5):
        entropy, score = fenced(torch.rand(images, cells) * (1 + layer % 3)), some(images, cells)
        mean = fenced(torch.rand(images, dtype=torch.float64)) if known else None  # of some other scale
        asked = fenced(torch.tensor(ratio, dtype=torch.float64))
        found = fused_link_and_select(entropy, score, asked, notes, layer, rule, copies, mean)
        means.append(plain(entropy).mean(1) if mean is None else plain(mean))
        counts = []
        for image, wanted in enumerate(ratio):
            usual = np.mean([m[image] for m in means[rule.first : layer]]) if layer > rule.first else None
            deviation = means[-1][image] / usual - 1 if rule.linked and usual is not None else 0.0
            share = min(max(wanted * (1 - deviation), rule.lowest), 1.0) if wanted else 0.0
            rounded = math.floor((1 - share) * cells + 0.5)
            counts.append(rounded if rule.rounds else max(cells - math.floor(share * cells), 1))
            noted = [means[-1][image], share, deviation, counts[-1]]
            np.testing.assert_allclose(notes[layer, :, image], noted, atol=1e-12)
        assert notes[layer + 1 :].isnan().all()
        selected(*found, score, counts, copies)


NORMS = {
    "modulated": (True, lambda m: Norm(0.05, m[:, :, 2], m[:, :, 3], plus_one=True)),
    "layer norm": (False, lambda m: Norm(0.05, m[0, 0, 2], m[0, 0, 3])),
    "rms": (False, lambda m: Norm(0.05, m[0, 0, 2], rms=True)),
    "bare": (False, lambda m: Norm(0.05)),
}
DELTAS = {
    "nothing": lambda *shape: None,
    "one": lambda *shape: fenced(torch.randn(shape[1], shape[0], shape[2]).transpose(0, 1)),  # not as it is read
    "parts": lambda *shape: SplitKPartials(some(4, *shape), some(shape[-1])),
    "a part": lambda *shape: SplitKPartials(some(1, *shape)),
}


def summed(delta: Tensor | SplitKPartials | None, gate: Tensor | None) -> Array | float:
    if delta is None:
        return 0.0
    if isinstance(delta, SplitKPartials):
        total = plain(delta.partials).sum(0) + (0 if delta.bias is None else plain(delta.bias))
    else:
        total = plain(delta)
    return total if gate is None else total * plain(gate)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("delta", "gated"), [("nothing", False), ("one", True), ("parts", True), ("a part", False)])
@pytest.mark.parametrize("channels", [33])
def test_sum_and_norm(kind: str, delta: str, gated: bool, channels: int) -> None:
    """A small stream, so that the norm's epsilon counts."""
    rows, cells = 3, 7
    x = fenced((torch.randn(rows, cells + 2, channels) * 0.3 + 0.2)[:, 2:])
    modulation = some(rows, 1, 6, channels)
    per_row, make = NORMS[kind]
    norm, gate = make(modulation), modulation[:, :, 5] if gated else None
    waiting = DELTAS[delta](rows, cells, channels)
    out, normed = residual_norm_kernels.fused_sum_and_norm(
        x, None, False, waiting, gate, norm, InputFormat(torch.float32)
    )
    exact = plain(x) + summed(waiting, gate)
    close(out, exact)
    y = layer_norm(exact, norm.eps, norm.rms)
    y = y if norm.factor is None else y * (plain(norm.factor) + per_row)
    close(normed, y if norm.term is None else y + plain(norm.term), 5e-5)
    _, small = residual_norm_kernels.fused_sum_and_norm(
        x, None, False, waiting, gate, Norm(0.05), InputFormat(FP8_DTYPE, 200.0)
    )
    close_fp8(small, layer_norm(exact, 0.05) * 200)
    if waiting is not None:
        shared = fenced(gate[:1]) if gated else None  # of all rows
        close(residual_norm_kernels.fused_sum(x, waiting, shared), plain(x) + summed(waiting, shared))


def lost(x: Tensor | SplitKPartials | None, total: int) -> Tensor | SplitKPartials | None:
    """The same tokens; what lies behind the last one is NaN."""
    if x is not None:
        (x.partials if isinstance(x, SplitKPartials) else x)[..., total:, :] = math.nan
    return x


def first(x: Tensor, total: int) -> Tensor:
    """The tokens of x [1, T, C] that are there; nobody wrote behind them."""
    assert x.dtype != torch.float32 or x[:, total:].isnan().all()
    return x[:, :total]


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("delta", "gated"), [("nothing", False), ("one", True), ("parts", True), ("a part", False)])
@pytest.mark.parametrize(
    ("counts", "room", "many"), [([3, 0, 7], None, 132), ([3, 0, 7], 10, 1), ([0, 0, 0], 0, 1), ([7, 7, 7], None, 1)]
)
def test_sum_and_norm_of_packed_tokens(on, kind: str, delta: str, gated: bool, counts, room, many: int) -> None:
    """Taken out of a stream, or already on their way."""
    on(many)
    rows, cells, channels, total = 3, 7, 33, sum(counts)
    x = fenced((torch.randn(rows, cells + 2, channels) * 0.3 + 0.2)[:, 2:])
    modulation = some(rows, 1, 6, channels)
    per_row, make = NORMS[kind]
    norm, gate = make(modulation), modulation[:, :, 5] if gated else None
    chosen, kept = some_tokens(cells, counts, room)
    tokens, row = len(chosen.cell), [row for row, n in enumerate(counts) for _ in range(n)]

    def gather_rows(vector: Tensor) -> Array:
        return plain(vector)[row, 0][None] if vector.ndim == 3 else plain(vector)

    for take in (True, False):
        before = np.concatenate([plain(x[r])[i] for r, i in enumerate(kept)])[None] if take else None
        source = x if take else lost(some(1, tokens, channels, by=0.3, plus=0.2), total)
        before = plain(source)[:, :total] if before is None else before
        waiting = lost(DELTAS[delta](1, tokens, channels), total)
        given = source, chosen, take, waiting, gate
        out, normed = residual_norm_kernels.fused_sum_and_norm(*given, norm, InputFormat(torch.float32))
        assert out.shape == normed.shape == (1, tokens, channels)
        added = summed(waiting, None)
        added = added if waiting is None else added[:, :total] * (1 if gate is None else gather_rows(gate))
        exact = before + added
        close(first(out, total), exact)
        y = layer_norm(exact, norm.eps, norm.rms)
        y = y if norm.factor is None else y * (gather_rows(norm.factor) + per_row)
        close(first(normed, total), y if norm.term is None else y + gather_rows(norm.term), 5e-5)
        if total:
            _, small = residual_norm_kernels.fused_sum_and_norm(*given, Norm(0.05), InputFormat(FP8_DTYPE, 200.0))
            close_fp8(first(small, total), layer_norm(exact, 0.05) * 200)
        if waiting is not None and not take:
            close(first(residual_norm_kernels.fused_sum(source, waiting, gate, chosen), total), exact)


def a_stream(chosen: Packed, channels: int, delta: str) -> tuple[ResidualStream, Array]:
    """Of chosen tokens, and what it comes to."""
    total, tokens = int(chosen.start[-1]), len(chosen.cell)
    gate = some(len(chosen.slot), 1, channels)
    y, waiting = lost(some(1, tokens, channels), total), lost(DELTAS[delta](1, tokens, channels), total)
    stream = ResidualStream(y)
    stream.delta, stream.gate = waiting, gate
    exact, row = plain(y)[0, :total], chosen.row.long()[:total]
    return stream, exact if waiting is None else exact + summed(waiting, None)[0, :total] * plain(gate)[row, 0]


def put(expected: Array, kept: list[list[int]], tokens: Array) -> None:
    for row, cells in enumerate(kept):
        expected[row, cells], tokens = tokens[: len(cells)], tokens[len(cells) :]


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("room", [None, 30], ids=["all room", "no room to spare"])
@pytest.mark.parametrize(
    ("grids", "delta", "channels"), [(((3, 2), (4, 5)), "parts", 65), (((2, 2), (4, 5)), "one", 20)]
)
def test_restore(mode: str, room: int | None, grids, delta: str, channels: int) -> None:
    rows, images, cells = 3, 2, math.prod(grids[1])
    chosen, kept = some_tokens(cells, [0, cells // 2, cells], room)
    x = some(rows, cells, channels, plus=2.0)
    stream, exact = a_stream(chosen, channels, delta)
    cached = fenced(torch.randn(rows, math.prod(grids[0]), channels).half())
    expected = plain(x) + resized_tokens(cached, grids, mode)
    put(expected, kept, exact)
    before, added = plain(x).copy(), some(rows, cells, channels)
    moments = some(images, cells, 2)
    added.fill_(math.nan), moments.fill_(math.nan)
    found = restore_kernels.fused_restore(x, cached, grids, mode, chosen, stream, added, moments)
    assert found.data_ptr() == x.data_ptr(), "in its place"
    close(found, expected)
    close(added, expected - before)
    close(moments, np.stack((expected.mean(-1), expected.var(-1)), -1)[:images])


@pytest.mark.parametrize("channels", [20, 65])
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize(
    ("counts", "room", "many"), [([0, 6, 1, 5], None, 132), ([0, 11, 1, 0], 12, 1), ([0, 0, 0, 0], 0, 1)]
)
def test_put(on, channels: int, delta: str, counts: list[int], room: int | None, many: int) -> None:
    on(many)
    rows, images, cells = 4, 2, 11
    (chosen, kept), x = some_tokens(cells, counts, room), some(rows, cells, channels)
    stream, exact = a_stream(chosen, channels, delta)
    moments = some(images, cells, 2)
    expected, noted = plain(x).copy(), plain(moments).copy()
    put(expected, kept, exact)
    for row in range(images):
        noted[row, kept[row]] = np.stack((expected.mean(-1), expected.var(-1)), -1)[row, kept[row]]
    close(restore_kernels.fused_scatter(x, chosen, stream, moments), expected)
    close(moments, noted)


@pytest.mark.parametrize("channels", [20, 65])
@pytest.mark.parametrize("delta", DELTAS)
def test_record(channels: int, delta: str) -> None:
    rows, cells = 4, 11
    x, y, gate = some(rows, cells, channels), some(rows, cells, channels), some(rows, 1, channels)
    stream = ResidualStream(y)
    stream.delta, stream.gate = DELTAS[delta](rows, cells, channels), gate
    exact = plain(y) + summed(stream.delta, gate)
    before, added = plain(x).copy(), some(rows, cells, channels)
    added.fill_(math.nan)
    close(restore_kernels.fused_record(x, stream, added), exact)
    close(added, exact - before)


def test_a_stream_may_be_put_back_as_it_was_taken() -> None:
    """No layer added anything."""
    (chosen, _), x = some_tokens(9, [4, 0, 9]), some(3, 9, 12)
    expected = plain(x).copy()
    close(restore_kernels.fused_scatter(x, chosen, ResidualStream(x, chosen)), expected)


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (1, 17), (3, 11)])
@pytest.mark.parametrize("out", [64, 192])
def test_a_linear_layer_for_few_rows(shape: tuple[int, int], out: int) -> None:
    x, weight = some(*shape, 512), some(out, 512)
    sums = fused_split_k(x, weight, 0.5, 4, 64, 64)
    for part, of in enumerate(sums):
        mine = slice(128 * part, 128 * part + 128)
        close(of, plain(x[..., mine]) @ plain(weight[:, mine]).T / 2, 1e-4)


def test_a_linear_layer_in_fp8_for_few_rows() -> None:
    x, weight = (fenced(torch.randint(-7, 8, shape).to(FP8_DTYPE)) for shape in ((3, 3, 256), (64, 256)))
    sums = fused_split_k(x, weight, 0.125, 2, 64, 128)
    close(sums.sum(0), plain(x.float()) @ plain(weight.float()).T / 8, 0)


@pytest.mark.parametrize("activation", [False, True], ids=["cast", "gelu"])
@pytest.mark.parametrize("count", [0, 1, BLOCK, BLOCK + 1])
def test_numbers_as_a_layer_reads_them(activation: bool, count: int) -> None:
    x = fenced((torch.randn(2, count) * 3).t())  # not in the order in which it is read
    if count > 1:
        x[:3, 0] = torch.tensor([math.nan, 1e6, -1e6])
    exact = gelu(plain(x)) if activation else plain(x)
    close(fused_cast(x, InputFormat(torch.float32, 4.0), activation), exact)
    close_fp8(fused_cast(x, InputFormat(FP8_DTYPE, 4.0), activation), exact * 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 163])
def test_numbers_between_host_and_device(monkeypatch, dtype: torch.dtype, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    source = fenced((torch.randn(count) * 1000).to(dtype))
    to = fenced(source, copy=False)
    fused_copy(to, source)
    assert torch.equal(to, source)
