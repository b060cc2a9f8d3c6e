"""How many pages a KV cache has: there are enough before every scale, whatever it keeps, and no more than need be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nextscale.cache import paged
from nextscale.cache.paged import PagedKVCache, PagePool
from nextscale.runtime.cudagraph.memory_arena import MemoryArena
from nextscale.runtime.cudagraph.readback import HostReadback, PendingReport

HEADS, SIZE, WIDTH = 2, 4, 8


def some_pages(layers: int = 3, rows: int = 2, tokens: int = 40, take=None) -> PagePool:
    take = take or MemoryArena(torch.device("cpu")).allocator()
    return PagePool(layers, rows, (HEADS, SIZE, WIDTH), tokens, torch.float32, torch.device("cpu"), take)


@pytest.fixture
def exactly(monkeypatch) -> None:
    """No page more than is asked for."""
    monkeypatch.setattr(paged, "INITIAL_SHARE", 0.0)
    monkeypatch.setattr(paged, "GROWTH_STEP", 1)
    monkeypatch.setattr(paged, "GROWTH_SHARE", 0.0)


def never() -> int:
    raise AssertionError("nobody has to wait")


def test_nobody_waits_while_there_are_enough(exactly) -> None:
    held = some_pages()
    assert len(held.pages) == 6, "a page for every row of every layer"
    assert not held.ensure_free(2, 2, 2, never)
    assert not held.ensure_free(2, 4, 2, never), "all tokens so far fit into one page of a row"
    asked: list[int] = []
    assert held.ensure_free(9, 13, 2, lambda: asked.append(6) or 6)
    assert len(held.pages) == 3 * 2 * 4, "as many as 13 tokens need"
    assert asked == [6]
    assert not held.ensure_free(3, 16, 2, never)


def test_only_what_is_taken_counts(exactly) -> None:
    """A scale that kept little leaves its pages to the next one."""
    held = some_pages()
    held.ensure_free(16, 16, 2, lambda: 0)
    assert len(held.pages) == 24
    assert not held.ensure_free(8, 24, 2, lambda: 12), "12 of 24 are left"
    assert held.ensure_free(8, 32, 2, lambda: 13)
    assert len(held.pages) == 25
    held.taken.fill_(13)
    held.reset()
    assert not held.taken.any()
    assert not held.ensure_free(16, 16, 2, never), "what was made stays"


def test_rows_that_have_left_need_nothing(exactly) -> None:
    held = some_pages(rows=2)
    held.ensure_free(4, 4, 2, lambda: 0)
    assert held.ensure_free(4, 8, 1, lambda: 6)
    assert len(held.pages) == 9


def test_there_are_always_enough(exactly) -> None:
    """Whatever is kept, and never more than a run that keeps all tokens has."""
    chance, scales = random.Random(0), [1, 4, 9, 16, 10]
    ends = list(itertools.accumulate(scales))
    for _ in range(200):
        held, lengths, taken = some_pages(), [[0] * 2 for _ in range(3)], 0
        for new, end in zip(scales, ends, strict=True):
            held.ensure_free(new, end, 2, lambda taken=taken: taken)
            for layer, row in itertools.product(range(3), range(2)):
                kept = chance.choice((0, new, chance.randint(0, new)))
                before, lengths[layer][row] = lengths[layer][row], lengths[layer][row] + kept
                taken += -(-lengths[layer][row] // SIZE) - -(-before // SIZE)
            assert taken <= held.max_taken <= len(held.pages) <= held.free.numel()


def test_some_more_are_made_than_are_missing(monkeypatch) -> None:
    """So that it does not happen often."""
    monkeypatch.setattr(paged, "INITIAL_SHARE", 0.15)
    monkeypatch.setattr(paged, "GROWTH_STEP", 8)
    held = some_pages(tokens=400)
    assert held.free.numel() == 600
    assert len(held.pages) == 96, "15 %, in steps"
    assert held.ensure_free(68, 68, 2, lambda: 1)
    assert len(held.pages) == 104
    monkeypatch.setattr(paged, "GROWTH_SHARE", 0.5)
    held.ensure_free(8, 76, 2, lambda: 97)
    assert len(held.pages) == 160
    held.ensure_free(400, 400, 2, lambda: 160)
    assert len(held.pages) == 600, "more could not be used"


def test_pages_are_found_from_the_first(exactly) -> None:
    """In memory that lies anywhere, also in front of it."""
    field = torch.zeros(1 << 16)
    offsets = iter((8192, 0, 4096, 32768, 1024, 2048, *range(40960, 61440, 1024)))

    def take(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        at = next(offsets)
        return field[at : at + 2 * HEADS * SIZE * WIDTH].view(*shape)

    held = some_pages(take=take)
    held.ensure_free(8, 8, 2, lambda: 0)
    assert held.free[:7].tolist() == [0, -8192, -4096, 24576, -7168, -6144, 32768]
    assert list(held.pages) == held.free[: len(held.pages)].tolist()


def test_call_shapes_share_the_memory_of_their_pages(exactly) -> None:
    arena = MemoryArena(torch.device("cpu"))
    first, second = (some_pages(take=arena.allocator()) for _ in range(2))
    assert first.first.data_ptr() == second.first.data_ptr(), "only one of them is used at a time"
    first.ensure_free(40, 40, 2, lambda: 0)
    assert len({page.data_ptr() for page in first.pages.values()}) == 60
    assert len(arena.chunks) == 1


def test_a_cache_whose_rows_leave() -> None:
    held = some_pages()
    lengths = torch.tensor([[5, 3]] * 3)
    held.page_table[1, :, :2] = held.free[:4].view(2, 2)
    for n, page in enumerate(list(held.pages.values())[:4]):
        page.fill_(n)
    cache = PagedKVCache(held, 1, lengths[1])
    cache.keep_rows(slice(1))
    assert cache.pages.table.data_ptr() == held.page_table[1].data_ptr(), "where a graph looks for it"
    assert cache.lengths.tolist() == [5]
    cache = PagedKVCache(held, 1, lengths[1])
    cache.keep_rows(torch.tensor([1]))
    assert cache.without_pages().k.unique().tolist() == [2]
    cache = PagedKVCache(held, 1, lengths[1]).without_pages()
    assert cache.lengths.tolist() == [5, 3]
    assert cache.v[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1]
    assert cache.max_length == 5


@pytest.mark.parametrize("taken", [None, torch.tensor([71], dtype=torch.int32)])
def test_a_scale_reports_how_many_are_taken(taken: Tensor | None) -> None:
    report, largest = {"kept": torch.tensor([3, 4])}, torch.tensor([1.5, 2.5])
    readback = HostReadback(report, largest, taken)
    readback.write(report, largest, taken)
    found = PendingReport(readback, lambda: None)
    assert readback.max_logits == [1.5, 2.5]
    assert found["kept"].tolist() == [3, 4]
    assert list(found) == ["kept"], "a method does not see it"
    if taken is not None:
        assert found.pages == 71


def test_a_warm_up_makes_no_pages(exactly) -> None:
    """Every page stands for many until there are more."""
    held = some_pages()
    there = list(held.pages)
    held.repeat_pages()
    assert held.free.tolist() == (there * 10)[: held.free.numel()]
    assert list(held.pages) == there
    held.reset()
    held.ensure_free(8, 8, 2, lambda: 0)
    assert held.free[: len(held.pages)].tolist() == list(held.pages)
    assert len(set(held.pages)) == 12
