"""A KV cache in pages, in Triton's interpreter: against plain numpy, against keys that lie side by side, and in whole
runs. Every page lies alone, with NaN around it, so that nothing can be found by chance."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.emulated_graphs import EmulatedGraphs
from support.fences import fenced, fences, some, some_tokens, whole
from support.methods import CAPTURED
from support.pipelines import ask, same_tokens
from support.plain import Array, attention, close, cosine, halves, pairs, plain
from torch import Tensor, nn

from nextscale.cache import paged
from nextscale.cache.kv import commit_lengths
from nextscale.cache.paged import LayerPageTable, PagedKVCache, PagePool
from nextscale.kernels.fp8 import FP8_DTYPE, InputFormat
from nextscale.kernels.triton import flash_attention as flash_attention_kernels
from nextscale.kernels.triton import kv_store as kv_store_kernels
from nextscale.kernels.triton import varlen_attention as varlen_attention_kernels
from nextscale.kernels.triton.flash_attention import fused_attention
from nextscale.methods.base import Method
from nextscale.runtime.cudagraph.sync_detection import SyncDetected
from nextscale.testing import tiny_hart, tiny_infinity

SIZE, HEADS, WIDTH, CELLS = 16, 2, 32, 40


@pytest.fixture(autouse=True)
def _fences(request, monkeypatch) -> Iterator[None]:
    with fences(request.node.name, monkeypatch):
        yield


def nowhere(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that lies alone."""
    return fenced(torch.full(tuple(shape), math.nan, dtype=dtype))


def some_pages(layers: int, rows: int, tokens: int) -> PagePool:
    return PagePool(layers, rows, (HEADS, SIZE, WIDTH), tokens, torch.float32, torch.device("cpu"), nowhere)


def turned(x: Array, scale: Tensor | None, positions: Array | None, turn: str) -> Array:
    """Queries, or keys if there is no scale, [H, K, D] as attention wants them."""
    x = cosine(x, None if scale is None else plain(scale.flatten()))
    if positions is None:
        return x
    return halves(x, positions) if turn == "halves" else pairs(x, positions)


# The tokens of three rows in scales and their layers; a number: all rows have so many, and they are complete.
SCALES: list[list[int | list[int]]] = [
    [5, 5],
    [[0, 11, 12], [3, 0, 30]],  # up to a page's end, one behind it, over two ends
    [[0, 0, 0], [1, 0, 0]],
    [16, 16],
    [[32, 16, 17], 40],
    [[0, 1, 0], [1, 1, 1]],
]


@pytest.mark.parametrize(
    ("turn", "splits", "num_sms", "ending", "grows"),
    [
        ("still", 1, 1, [[0, 40, 3], [1, 0, 0]], True),
        ("pairs", 4, 3, [40, 40], True),
        ("halves", 2, 132, None, True),
        ("halves", 2, 132, None, False),
    ],
)
def test_a_cache_in_pages(monkeypatch, turn: str, splits: int, num_sms: int, ending, grows: bool) -> None:
    """Scale after scale: what layers store, what they see, the entropy of that, and which pages are
    taken. Keys of the last scale may lie elsewhere."""
    for module in (kv_store_kernels, flash_attention_kernels, varlen_attention_kernels):
        monkeypatch.setattr(module, "num_sms", lambda _: num_sms)
    counters = torch.zeros(3 * num_sms, dtype=torch.int32)
    monkeypatch.setattr(varlen_attention_kernels, "counters", lambda _: counters)
    monkeypatch.setattr(flash_attention_kernels, "num_kv_splits", lambda *sizes: splits)
    monkeypatch.setattr(varlen_attention_kernels, "MIN_KEYS_IDLE", 8)
    monkeypatch.setattr(varlen_attention_kernels, "MIN_KEYS_BUSY", 8)
    monkeypatch.setattr(paged, "INITIAL_SHARE", 0.0 if grows else 1.0)
    monkeypatch.setattr(paged, "GROWTH_STEP", 1)
    layers, rows, most = 2, 3, 5 + 4 * CELLS + 16
    scale = fenced(torch.tensor([1.3, 7.0]).view(1, HEADS, 1, 1))
    attn = SimpleNamespace(log_scale=scale, pairs=turn == "pairs", softmax_scale=0.3, proj=nn.Linear(4, 4))
    held = some_pages(layers, rows, most)
    lengths = fenced(torch.zeros(layers, rows, dtype=torch.long))
    caches = [PagedKVCache(held, layer, length) for layer, length in enumerate(lengths)]
    kept = [[[np.zeros((HEADS, 0, WIDTH))] * 2 for _ in range(rows)] for _ in range(layers)]
    taken, grown, end = 0, 0, 0
    for counts in [*SCALES, ending] if ending else SCALES:
        cells = counts[0] if isinstance(counts[0], int) else CELLS
        end += cells
        if counts is ending:
            tail = tuple(fenced(torch.full((rows, HEADS, CELLS, WIDTH), math.nan)) for _ in "kv")
            for cache in caches:
                cache.last_scale_kv = tail
        else:
            grown += held.ensure_free(cells, end, rows, lambda: int(held.taken[-1]))
        for layer, cache in enumerate(caches):
            complete = isinstance(counts[layer], int)
            gather_rows = [cells] * rows if complete else counts[layer]
            if complete:
                cells = counts[layer]
                chosen, which = None, [list(range(cells))] * rows
                qkv = some(rows, cells, 3, HEADS, WIDTH)
                mine = list(plain(qkv))
                gather_rows = [cells] * rows
            else:
                chosen, which = some_tokens(CELLS, gather_rows)
                qkv = some(1, len(chosen.cell), 3, HEADS, WIDTH)
                qkv[:, sum(gather_rows) :] = math.nan
                mine = np.split(plain(qkv)[0, : sum(gather_rows)], np.cumsum(gather_rows)[:-1])
            positions = None
            if turn != "still":
                angle = torch.randn(1, CELLS if chosen is not None else cells, WIDTH // (2 if turn == "pairs" else 1))
                positions = fenced(torch.stack((angle.cos(), angle.sin()), -1))
            before = [k.shape[1] for k, _ in kept[layer]]
            output, found_entropy = cache.attend_with_entropy(attn, qkv, positions, chosen, rows)
            assert found_entropy is not None
            first = 0
            for row, new in enumerate(gather_rows):
                q, k, v = mine[row].transpose(1, 2, 0, 3)
                at = None if positions is None else plain(positions)[0][which[row]]
                old, now = kept[layer][row], (turned(k, None, at, turn), v)
                every = [np.concatenate(both, 1) for both in zip(old, now, strict=True)]
                if counts is not ending:
                    kept[layer][row] = every
                found = output[row] if chosen is None else output[0, :, first : first + new]
                if new:
                    asked = torch.from_numpy(turned(q, scale, at, turn))[None]
                    exact, right = attention(asked, *(torch.from_numpy(t)[None] for t in every), 0.3)
                    close(found, exact[0], 1e-4)
                    close(found_entropy[row, :new], right[0], 1e-4)
                first += new
            if counts is not ending:
                taken += sum(-(-(a + n) // SIZE) - -(-a // SIZE) for a, n in zip(before, gather_rows, strict=True))
                assert int(held.taken[layer]) == taken
        commit_lengths(caches)
        for layer, row in itertools.product(range(layers), range(rows)):
            holds(held, layer, row, kept[layer][row])
        in_use = [
            offset
            for layer, row in itertools.product(range(layers), range(rows))
            for offset in held.page_table[layer, row, : -(-kept[layer][row][0].shape[1] // SIZE)].tolist()
        ]
        assert sorted(in_use) == sorted(held.free[:taken].tolist()), "each is somebody's, and one's only"
    assert bool(grown) == grows
    for cache, gather_rows in zip(caches, kept, strict=True):
        cache.last_scale_kv = None
        if not ending:
            plain_one = cache.without_pages()
            for row, both in enumerate(gather_rows):
                n = both[0].shape[1]
                assert int(plain_one.lengths[row]) == n
                for found, exact in zip((plain_one.k, plain_one.v), both, strict=True):
                    close(found[row, :, :n], exact)


def holds(held: PagePool, layer: int, row: int, expected: Sequence[Array]) -> None:
    """What was stored, and NaN behind it."""
    tokens = expected[0].shape[1]
    offsets = held.page_table[layer, row, : -(-tokens // SIZE)].tolist()
    if offsets:
        found = torch.cat([held.pages[offset] for offset in offsets], dim=2)
        for part, exact in zip(found, expected, strict=True):
            close(part[:, :tokens], exact)
            assert part[:, tokens:].isnan().all()


def in_pages(k: Tensor, v: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, LayerPageTable]:
    """The same keys and values in pages, which lie anywhere; nobody may look for others."""
    rows, most = len(lengths), -(-max(lengths) // SIZE)
    memory = [nowhere((2, HEADS, SIZE, WIDTH), k.dtype) for _ in range(rows * most)]
    order = torch.randperm(len(memory)).view(rows, most)
    table = torch.full((rows, most + 1), 1 << 60)
    for row, n in enumerate(lengths):
        for number in range(-(-n // SIZE)):
            page = memory[order[row, number]]
            part = slice(number * SIZE, min(number * SIZE + SIZE, n))
            for place, there in zip(page, (k, v), strict=True):
                place[:, : part.stop - part.start] = there[row, :, part]
            table[row, number] = (page.data_ptr() - memory[0].data_ptr()) // k.element_size()
    shape, strides = (rows, HEADS, k.shape[2], WIDTH), (0, SIZE * WIDTH, 0, 1)
    views = [part.as_strided(shape, strides) for part in memory[0]]
    nothing = torch.zeros(1, dtype=torch.int32)
    return *views, LayerPageTable(fenced(table), table, nothing, nothing, SIZE)


CONFIG = {"BLOCK_Q": 16, "BLOCK_K": SIZE, "num_warps": 4}


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(
    ("length", "new", "apart", "dtype"),
    [
        ([0, 17, 32], 17, False, torch.float32),
        ([1, 47, 16], 1, False, FP8_DTYPE),
        ([48, 5, 0], 20, True, torch.float32),
        ([16, 30, 1], 16, True, FP8_DTYPE),
    ],
)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("counts", [None, [3, 0, 1], [20, 1, 17]], ids=["complete", "few", "packed"])
def test_pages_show_what_keys_side_by_side_show(
    monkeypatch, splits, length, new, apart, dtype, entropy, counts
) -> None:
    """To the last digit."""
    monkeypatch.setattr(varlen_attention_kernels, "num_sms", lambda _: 16)
    counters = torch.zeros(48, dtype=torch.int32)
    monkeypatch.setattr(varlen_attention_kernels, "counters", lambda _: counters)
    chosen = None if counts is None else some_tokens(CELLS, counts)[0]
    gather_rows = counts or [new] * 3
    q = some(3, HEADS, new, WIDTH) if chosen is None else some(1, HEADS, 3 * CELLS, WIDTH)
    k, v = some(3, HEADS, 96, WIDTH), some(3, HEADS, 96, WIDTH)
    tail = (some(3, HEADS, CELLS, WIDTH), some(3, HEADS, CELLS, WIDTH)) if apart else None
    visible = length if apart else [a + b for a, b in zip(length, gather_rows, strict=True)]
    paged_k, paged_v, table = in_pages(k, v, visible)
    monkeypatch.setattr(flash_attention_kernels, "block_config", lambda *sizes: dict(CONFIG))
    monkeypatch.setattr(flash_attention_kernels, "num_kv_splits", lambda *sizes: splits)
    monkeypatch.setattr(varlen_attention_kernels, "BLOCKS", CONFIG)
    for name in ("MIN_KEYS_IDLE", "MIN_KEYS_BUSY"):
        monkeypatch.setattr(varlen_attention_kernels, name, 8 if splits > 1 else 999)
    more = None if counts else whole(*gather_rows)
    options = {"chosen": chosen, "grown": chosen is not None, "input_format": InputFormat(dtype, 4.0)}
    results = [
        fused_attention(q, k, v, 0.3, whole(*length), more, entropy, tail, **options),
        fused_attention(q, paged_k, paged_v, 0.3, whole(*length), more, entropy, tail, **options, pages=table),
    ]
    if chosen is None:  # all rows have as many more
        results.append(
            fused_attention(q, paged_k, paged_v, 0.3, whole(*length), new, entropy, tail, **options, pages=table)
        )
    real = slice(None) if chosen is None else slice(sum(gather_rows))
    for output, found_entropy in results[1:]:
        assert torch.equal(output[:, :, real].float(), results[0][0][:, :, real].float())
        assert (found_entropy is not None) == entropy
        if found_entropy is not None:
            assert torch.equal(found_entropy[:, real], results[0][1][:, real])


MAKERS = {"infinity": tiny_infinity, "hart": tiny_hart}
RUNS = [  # with so many images; rows that fill up a batch rest
    ("hart", "nova, attention", 1),
    ("hart", "nova and guidance", 3),
    ("hart", "fastvar, complete in between", 2),
    ("infinity", "nova, early", 2),
]


@pytest.fixture
def with_pages(monkeypatch) -> None:
    """Programs have pages, of which there are never enough at first, and tokens lie packed."""
    for place in ("cudagraph.static_buffers", "eager"):
        monkeypatch.setattr(f"nextscale.runtime.{place}.supports_packed", lambda backbone: True)
    monkeypatch.setattr("nextscale.runtime.cudagraph.static_buffers.PAGE_SIZE", SIZE)
    monkeypatch.setattr(paged, "INITIAL_SHARE", 0.0)
    monkeypatch.setattr(paged, "GROWTH_STEP", 1)
    for module in (kv_store_kernels, varlen_attention_kernels):
        monkeypatch.setattr(module, "num_sms", lambda _: 2)
    counters = torch.zeros(6, dtype=torch.int32)
    monkeypatch.setattr(varlen_attention_kernels, "counters", lambda _: counters)


def early(pipe, method: Method, images: int, first: int = 0):
    """Without the largest scales of a run that has such."""
    scales = [s.tokens for s in pipe.schedule()]
    ended = {"callback_on_scale_end": lambda end: end.scale.index < 5} if max(scales) > 256 else {}
    return ask(pipe, images, first=first, method=method, output_type="latent", **ended)


@pytest.mark.parametrize(("name", "method", "images"), RUNS)
def test_runs_with_pages(with_pages, name: str, method: str, images: int) -> None:
    pipe = MAKERS[name](width=64)
    other = copy.copy(pipe)
    other.executor = graphs = EmulatedGraphs()
    for first in (0, 2) if images == 1 else (0,):
        expected, found = (early(p, CAPTURED[method], images, first) for p in (pipe, other))
        assert same_tokens(expected, found)
        assert torch.allclose(expected.images, found.images, atol=1e-4)
        with torch.inference_mode():
            for chunk in graphs.arena.chunks:
                chunk.fill_(255)  # a decoder may leave NaN there
    assert graphs.current.buffers.pages is not None
    assert graphs.grown


@pytest.mark.parametrize("index", [5, 7], ids=["middle", "last"])
def test_scales_that_are_not_captured_leave_the_pages(with_pages, index: int, monkeypatch) -> None:
    """They go on with the cache of the call."""
    pipe = tiny_hart(width=64)
    other = copy.copy(pipe)
    other.executor = graphs = EmulatedGraphs()
    capture, method = graphs.capture, CAPTURED["nova, early"]

    def waits(graphs, call, batch, kv):
        captured = capture(graphs, call, batch, kv)
        if batch.scale.index == index:
            raise SyncDetected("waits")
        return captured

    monkeypatch.setattr(graphs, "capture", waits)
    expected, found = early(pipe, method, 2), early(other, method, 2)
    assert graphs.captured == index + 1
    assert same_tokens(expected, found)
    assert torch.allclose(expected.images, found.images, atol=1e-4)


def test_the_benchmark_of_pages_compares_the_same(monkeypatch) -> None:
    """Its caches hold the same keys, also when calls are repeated."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("pages")
    for name, value in {"HEADS": HEADS, "WIDTH": WIDTH, "PAGE_SIZE": SIZE, "COLD": 1}.items():
        monkeypatch.setattr(benchmark, name, value)
    for module in (kv_store_kernels, varlen_attention_kernels):
        monkeypatch.setattr(module, "num_sms", lambda _: 2)
    counters = torch.zeros(6, dtype=torch.int32)
    monkeypatch.setattr(varlen_attention_kernels, "counters", lambda _: counters)
    for case in (benchmark.Case(20, 20, 17), benchmark.Case(30, 7, 25), benchmark.Case(30, 9, 140, ends=True)):
        layers = benchmark.Layers(case, "cpu", torch.float32)
        assert case.sets == 3
        for _ in range(2):
            queries = [layers.store(n) for n in range(3)]
            for n in range(0 if case.ends else 3):
                real = slice(case.queries if case.complete else 2 * case.queries)
                assert torch.equal(layers.store_in_pages(n)[:, :, real], queries[n][:, :, real])
        more = case.queries if case.complete else None
        new_lengths = None if more is None else torch.full_like(layers.length, more)
        for n, q in enumerate(queries):
            output, in_pages = layers.attend(n, q, new_lengths, False)[0], layers.attend_in_pages(n, q, more, False)[0]
            assert benchmark.off(in_pages, output, case.queries * (1 if case.complete else 2)) < 1e-5
