"""Kernels that work on tokens, in Triton's interpreter against plain numpy: choosing, summing, norming, putting back.

Counts of 0 and 1, one more than a block, odd widths; padding, and all that nobody may read, is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from fences import fenced, fences, some, whole
from nextscale.kernels import modulate_triton, restore_triton
from nextscale.kernels.fp8 import FORMAT, Reads
from nextscale.kernels.fp8_triton import BLOCK, fused_cast
from nextscale.kernels.host_triton import fused_carry
from nextscale.kernels.modulate import Norm
from nextscale.kernels.parts import Parts
from nextscale.kernels.rows_triton import fused_parts
from nextscale.kernels.select_triton import fused_link_and_select, fused_select
from nextscale.methods.linkage import Linkage
from nextscale.methods.selection import Selection
from nextscale.models.stream import Stream
from plain import Array, close, eight_bits, gelu, highest, layer_norm, plain, resized_tokens


@pytest.fixture(autouse=True)
def _fences(request, monkeypatch) -> Iterator[None]:
    with fences(request.node.name, monkeypatch):
        yield


def selected(index: Tensor, count: Tensor, slot: Tensor, score: Tensor, counts: list[int], slots: int) -> None:
    cells = score.shape[1]
    for row, wanted in enumerate(counts):
        kept = highest(score[row], min(wanted, slots))
        assert index[row].tolist() == kept + [cells - 1] * (slots - len(kept))
        assert count[row] == len(kept)
        assert slot[row].tolist() == [kept.index(i) if i in kept else -1 for i in range(cells)]


@pytest.mark.parametrize(("cells", "slots"), [(1, 1), (17, 17), (64, 40), (65, 1), (100, 65)])
def test_select(cells: int, slots: int) -> None:
    score = some(6, cells)
    score[1] = 3.5  # all are equal
    score[2, ::3] = -0.0
    score[2, 1::3] = 0.0
    score[3, cells // 2] = math.inf
    score[3, 0] = -math.inf
    score[4, cells // 3 :] = score[4, 0]  # ties
    counts = [0, 1, cells, min(slots, cells // 2 + 1), cells // 2, slots]
    selected(*fused_select(score, whole(*counts), slots), score, counts, slots)


@pytest.mark.parametrize("rule", [Linkage(True), Linkage(True, 1, 0.3), Linkage(False, empty=True)])
@pytest.mark.parametrize("known", [False, True])
def test_link_and_select(rule: Linkage, known: bool) -> None:
    """The ratio of a layer from its entropy and those of the layers before, then the cells; for two copies of rows."""
    images, cells, slots, ratio = 3, 33, 30, [0.6, 0.0, 0.999]
    notes = fenced(torch.full((5, 4, images), math.nan, dtype=torch.float64))
    means: list[Array] = []
    for layer in range(5):
        entropy, score = fenced(torch.rand(images, cells) * (1 + layer % 3)), some(images, cells)
        mean = fenced(torch.rand(images, dtype=torch.float64)) if known else None  # of some other scale
        asked = fenced(torch.tensor(ratio, dtype=torch.float64))
        found = fused_link_and_select(entropy, score, asked, notes, layer, rule, slots, 2, mean)
        means.append(plain(entropy).mean(1) if mean is None else plain(mean))
        counts = []
        for image, wanted in enumerate(ratio):
            usual = np.mean([m[image] for m in means[rule.first : layer]]) if layer > rule.first else None
            deviation = means[-1][image] / usual - 1 if rule.linked and usual is not None else 0.0
            share = min(max(wanted * (1 - deviation), rule.lowest), math.nextafter(1.0, 0.0)) if wanted else 0.0
            counts.append(max(cells - math.floor(share * cells), 0 if rule.empty else 1))
            noted = [means[-1][image], share, deviation, counts[-1]]
            np.testing.assert_allclose(notes[layer, :, image], noted, atol=1e-12)
        assert notes[layer + 1 :].isnan().all()
        selected(*found, score.repeat(2, 1), counts * 2, slots)


NORMS = {
    "modulated": (True, lambda m: Norm(0.05, m[:, :, 2], m[:, :, 3], plus_one=True)),
    "layer norm": (False, lambda m: Norm(0.05, m[0, 0, 2], m[0, 0, 3])),
    "rms": (False, lambda m: Norm(0.05, m[0, 0, 2], rms=True)),
    "bare": (False, lambda m: Norm(0.05)),
}
DELTAS = {
    "nothing": lambda *shape: None,
    "one": lambda *shape: fenced(torch.randn(shape[1], shape[0], shape[2]).transpose(0, 1)),  # not as it is read
    "parts": lambda *shape: Parts(some(4, *shape), some(shape[-1])),
    "a part": lambda *shape: Parts(some(1, *shape)),
}


def summed(delta: Tensor | Parts | None, gate: Tensor | None) -> Array | float:
    if delta is None:
        return 0.0
    if isinstance(delta, Parts):
        total = plain(delta.sums).sum(0) + (0 if delta.bias is None else plain(delta.bias))
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
    for index in (None, fenced(torch.tensor([[6, 0, 3], [1, 2, 5], [4, 4, 0]]))):
        tokens = cells if index is None else index.shape[1]
        waiting = DELTAS[delta](rows, tokens, channels)
        out, normed = modulate_triton.fused_sum_and_norm(x, index, waiting, gate, norm, Reads(torch.float32))
        exact = plain(x) if index is None else np.stack([plain(x[r])[i] for r, i in enumerate(index)])
        exact = exact + summed(waiting, gate)
        close(out, exact)
        y = layer_norm(exact, norm.eps, norm.rms)
        y = y if norm.factor is None else y * (plain(norm.factor) + per_row)
        close(normed, y if norm.term is None else y + plain(norm.term), 5e-5)
        _, small = modulate_triton.fused_sum_and_norm(x, index, waiting, gate, Norm(0.05), Reads(FORMAT, 200.0))
        eight_bits(small, layer_norm(exact, 0.05) * 200)
    if waiting is not None:
        shared = fenced(gate[:1]) if gated else None  # of all rows
        waiting = DELTAS[delta](rows, cells, channels)
        close(modulate_triton.fused_sum(x, waiting, shared), plain(x) + summed(waiting, shared))


def a_selection(cells: int, counts: list[int], slots: int, known: bool) -> Selection:
    index = torch.full((len(counts), slots), cells - 1)
    slot = torch.full((len(counts), cells), -1, dtype=torch.int32)
    for row, n in enumerate(counts):
        index[row, :n] = torch.randperm(cells)[:n].sort().values
        slot[row, index[row, :n]] = torch.arange(n, dtype=torch.int32)
    return Selection(fenced(index), whole(*counts), fenced(slot) if known else None)


def a_stream(rows: int, counts: list[int], slots: int, channels: int, delta: str) -> tuple[Stream, Array]:
    """Of chosen tokens, the padding NaN; and what it comes to."""
    y, waiting, gate = some(rows, slots, channels), DELTAS[delta](rows, slots, channels), some(rows, 1, channels)
    for row, n in enumerate(counts):
        y[row, n:] = math.nan
        if waiting is not None:
            (waiting.sums if isinstance(waiting, Parts) else waiting)[..., row, n:, :] = math.nan
    stream = Stream(y)
    stream.delta, stream.gate = waiting, gate
    return stream, plain(y) + summed(waiting, gate)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("known", [False, True], ids=["slots unknown", "slots known"])
@pytest.mark.parametrize(
    ("grids", "delta", "channels"), [(((3, 2), (4, 5)), "parts", 65), (((2, 2), (2, 2)), "one", 20)]
)
def test_restore(mode: str, known: bool, grids, delta: str, channels: int) -> None:
    rows, images, cells = 3, 2, math.prod(grids[1])
    counts = [0, cells // 2, cells]
    chosen, x = a_selection(cells, counts, cells, known), some(rows, cells, channels, plus=2.0)
    stream, exact = a_stream(rows, counts, cells, channels, delta)
    cached = fenced(torch.randn(rows, math.prod(grids[0]), channels).half())
    expected = plain(x) + resized_tokens(cached, grids, mode)
    for row, n in enumerate(counts):
        expected[row, chosen.index[row, :n]] = exact[row, :n]
    before, added = plain(x).copy(), some(rows, cells, channels)
    moments = some(images, cells, 2)
    added.fill_(math.nan), moments.fill_(math.nan)
    found = restore_triton.fused_restore(x, cached, grids, mode, chosen, stream, added, moments)
    assert found.data_ptr() == x.data_ptr(), "in its place"
    close(found, expected)
    close(added, expected - before)
    close(moments, np.stack((expected.mean(-1), expected.var(-1)), -1)[:images])


@pytest.mark.parametrize("channels", [20, 65])
@pytest.mark.parametrize("delta", DELTAS)
def test_put_and_record(channels: int, delta: str) -> None:
    rows, images, cells, slots = 4, 2, 11, 6
    counts = [0, 6, 1, 5]
    chosen, x = a_selection(cells, counts, slots, False), some(rows, cells, channels)
    stream, exact = a_stream(rows, counts, slots, channels, delta)
    moments = some(images, cells, 2)
    expected, noted = plain(x).copy(), plain(moments).copy()
    for row, n in enumerate(counts):
        expected[row, chosen.index[row, :n]] = exact[row, :n]
        if row < images:
            there = np.stack((exact[row, :n].mean(-1), exact[row, :n].var(-1)), -1)
            noted[row, chosen.index[row, :n]] = there
    close(restore_triton.fused_put(x, chosen, stream, moments), expected)
    close(moments, noted)
    stream, exact = a_stream(rows, [cells] * rows, cells, channels, delta)
    before, added = plain(x).copy(), some(rows, cells, channels)
    added.fill_(math.nan)
    close(restore_triton.fused_record(x, stream, added), exact)
    close(added, exact - before)


def test_many_slots_are_found() -> None:
    """More than a program takes."""
    counts = [257]
    chosen, x = a_selection(258, counts, 258, False), some(1, 258, 4)
    stream, exact = a_stream(1, counts, 258, 4, "nothing")
    cached = some(1, 1, 4)
    expected = plain(x) + plain(cached)
    for row, n in enumerate(counts):
        expected[row, chosen.index[row, :n]] = exact[row, :n]
    grids = ((1, 1), (6, 43))
    close(restore_triton.fused_restore(x, cached, grids, "nearest", chosen, stream), expected)


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (1, 17), (3, 11)])
@pytest.mark.parametrize("out", [64, 192])
def test_a_linear_layer_for_few_rows(shape: tuple[int, int], out: int) -> None:
    x, weight = some(*shape, 512), some(out, 512)
    sums = fused_parts(x, weight, 0.5, 4, 64, 64)
    for part, of in enumerate(sums):
        mine = slice(128 * part, 128 * part + 128)
        close(of, plain(x[..., mine]) @ plain(weight[:, mine]).T / 2, 1e-4)


def test_a_linear_layer_in_8_bits_for_few_rows() -> None:
    x, weight = (fenced(torch.randint(-7, 8, shape).to(FORMAT)) for shape in ((3, 3, 256), (64, 256)))
    sums = fused_parts(x, weight, 0.125, 2, 64, 128)
    close(sums.sum(0), plain(x.float()) @ plain(weight.float()).T / 8, 0)


@pytest.mark.parametrize("activation", [False, True], ids=["cast", "gelu"])
@pytest.mark.parametrize("count", [0, 1, BLOCK, BLOCK + 1])
def test_numbers_as_a_layer_reads_them(activation: bool, count: int) -> None:
    x = fenced((torch.randn(2, count) * 3).t())  # not in the order in which it is read
    if count > 1:
        x[:3, 0] = torch.tensor([math.nan, 1e6, -1e6])
    exact = gelu(plain(x)) if activation else plain(x)
    close(fused_cast(x, Reads(torch.float32, 4.0), activation), exact)
    eight_bits(fused_cast(x, Reads(FORMAT, 4.0), activation), exact * 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 163])
def test_numbers_between_host_and_device(monkeypatch, dtype: torch.dtype, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    source = fenced((torch.randn(count) * 1000).to(dtype))
    to = fenced(source, copy=False)
    fused_carry(to, source)
    assert torch.equal(to, source)
