"""What belongs to one shape of call when its scales are CUDA graphs: fixed places, and the graphs that know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nextscale.devices import wait_for
from nextscale.draws import FixedDraws, PerImageDraws
from nextscale.kv import LayerCache
from nextscale.methods.numbers import FetchedNumbers
from nextscale.methods.residual import Places, TokenCaches
from nextscale.packing import Like, divide, ends
from nextscale.run import Rows, Run
from nextscale.runtime.eager import Work
from nextscale.runtime.recorded import Captured

STREAMS = 2.5  # residual streams of the last scale that graphs hold at once, about

Inputs = tuple[Tensor | None, ...]  # a condition, as its backbone has read it


class Arena:
    """Memory that belongs to the caches while scales are run, and to the decoder afterwards."""

    def __init__(self, device: torch.device, side: Any) -> None:
        self.pool = torch.cuda.MemPool() if device.type == "cuda" else None
        self.side = side
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def divide(self, like: Like) -> list[Tensor]:
        """Tensors of these shapes, one behind the other. What was there before is gone."""
        self.memory = self.memory.new_empty(0)
        with self.allocating():
            self.memory = torch.zeros(ends(like)[-1], dtype=torch.uint8, device=self.memory.device)
        wait_for(self.memory.device)
        return divide(self.memory, like)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        if self.pool is None:
            yield
        else:
            # torch gives freed memory only to the stream that it was taken for.
            with torch.cuda.stream(self.side), torch.cuda.use_mem_pool(self.pool):
                yield

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """While a graph is captured that uses this memory when nothing else does: gives the pool it has to take."""
        storage = self.memory.untyped_storage()
        size = storage.nbytes()
        with self.allocating():
            storage.resize_(0)
        try:
            yield None if self.pool is None else self.pool.id
        finally:
            with self.allocating():
                storage.resize_(size)


class Program:
    """Everything of one shape of call, at fixed places."""

    def __init__(self, work: Work, inputs: Inputs, run: Run) -> None:
        assert isinstance(work.draws, PerImageDraws)
        self.inputs: Inputs = tuple(None if t is None else t.clone() for t in inputs)
        self.features = run.features
        # Graphs share their memory, which torch only allows those that were captured on one stream.
        self.side: Any = torch.cuda.Stream() if self.features.is_cuda else None
        self.arena = Arena(self.features.device, self.side)
        rows, heads, _, width = run.kv[0].k.shape
        tokens, last = work.backbone.context + work.schedule.tokens, list(work.schedule)[-1].tokens
        # Keys and values of the last scale, of one layer at a time: nobody reads them later. Without a method they lie
        # behind the others, where torch's own attention finds them.
        room, behind = (tokens, 0) if work.policy.passive else (tokens - last, last)
        shapes = [(rows, heads, room, width)] * (2 * len(run.kv)) + [(rows, heads, behind, width)] * 2
        found = iter(self.arena.divide([(shape, work.backbone.dtype) for shape in shapes]))
        *self.kv, self.tail = [(next(found), next(found)) for _ in range(len(run.kv) + 1)]
        self.lengths = torch.zeros(len(self.kv), rows, dtype=torch.long, device=self.features.device)
        self.before = self.features.clone(), self.lengths.clone()
        self.all_tokens = torch.cat([t.flatten() for t in run.tokens])
        parts = self.all_tokens.split([t.numel() for t in run.tokens])
        self.tokens = [part.view(t.shape) for part, t in zip(parts, run.tokens, strict=True)]
        self.settings = work.sampling.all_numbers().to(self.features.device)
        self.draws = FixedDraws(work.draws)
        self.memory = TokenCaches(Places(work.schedule))
        self.states: dict[frozenset[Any], int] = {}
        self.numbers = FetchedNumbers(len(work.schedule))
        self.pool = torch.cuda.graph_pool_handle() if self.features.is_cuda else None
        self.beginning: tuple[Any, Any] = (None, None)  # a graph that makes the state, and the state
        self.graphs: dict[tuple[Any, ...], Captured] = {}  # of scales
        self.decoding: tuple[Any, Tensor, Tensor] | None = None  # a graph, the maps it reads, the pictures it makes
        self.stream = rows * max(s.tokens for s in work.schedule) * work.backbone.width * 4  # bytes of the largest
        self.has_working_memory = False

    def make_working_memory(self) -> None:
        """In one piece, before graphs ask for it bit by bit: what early scales ask for is too small for later ones."""
        if not self.has_working_memory:
            torch.empty(int(STREAMS * self.stream), dtype=torch.uint8, device=self.features.device)
            self.has_working_memory = True

    def load(self, work: Work, inputs: Inputs, images: int, guided: bool) -> Run:
        """Put what a call begins with to the fixed places, and let it work there."""
        assert isinstance(work.draws, PerImageDraws)
        for place, given in zip(self.inputs, inputs, strict=True):
            if place is not None and given is not None:
                place.copy_(given)
        graph, state = self.beginning
        graph.replay()
        self.settings.copy_(work.sampling.all_numbers(pinned=self.settings.is_cuda), non_blocking=True)
        self.draws.begin(work.draws)
        self.features.zero_()
        self.lengths.zero_()
        self.memory.remember({})
        self.numbers.begin()
        work.policy.memory, work.policy.numbers = self.memory, self.numbers
        kv = [LayerCache(k, v, length) for (k, v), length in zip(self.kv, self.lengths, strict=True)]
        self.all_tokens.fill_(-1)
        return Run(work.backbone, state, self.features, work.schedule, guided, kv, self.tokens)

    def misses(self, rows: Rows, kv: Sequence[LayerCache]) -> bool:
        """Whether pictures rest, or rows between others have left: then nothing lies where a graph would look."""
        moved = kv[0].k.data_ptr() != self.kv[0][0].data_ptr()
        return rows.images < len(self.features) or rows.guided is not None or moved

    def state(self) -> int:
        """A number for where all that the method remembers lies: a graph reads it there."""
        lies = frozenset(
            (name, e.grid, e.rows, e.maps.data_ptr()) for name, es in self.memory.entries().items() for e in es
        )
        return self.states.setdefault(lies, len(self.states))

    def save(self) -> None:
        for place, now in zip(self.before, (self.features, self.lengths), strict=True):
            place.copy_(now)

    def go_back(self) -> None:
        """To where `save` was called: as if the scale had not been run."""
        for place, now in zip(self.before, (self.features, self.lengths), strict=True):
            now.copy_(place)
