"""What belongs to one shape of call when its scales are CUDA graphs: fixed places, and the graphs that know them."""

from __future__ import annotations

import math
import operator
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
from nextscale.runtime.shelf import Shelf

SHARE = 0.2  # of a plain run's tokens: room in the KV cache to begin with, if a method leaves tokens out
SPARE = 1.1  # times what the first call needed of it: what is kept for the others
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


def with_room_to_spare(tokens: int) -> int:
    return -(-math.ceil(tokens * SPARE) // 64) * 64


class Program:
    """Everything of one shape of call, at fixed places."""

    def __init__(self, work: Work, inputs: Inputs, run: Run) -> None:
        assert isinstance(work.draws, PerImageDraws)
        self.inputs: Inputs = tuple(None if t is None else t.clone() for t in inputs)
        self.features = run.features
        self.kv = [(cache.k, cache.v) for cache in run.kv]
        self.rooms = [cache.k.shape[2] for cache in run.kv]  # entries that the cache of each layer has room for
        self.used = [0] * len(self.kv)  # of them that are used at most, in the call at work
        # Keys and values of the last scale, of one layer at a time: nobody reads them later.
        self.tail = tuple(t[:, :, :0].clone() for t in self.kv[0])
        self.longest = 0  # how much of it the newest call needed
        rows = len(run.kv[0].k)
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
        self.experience: dict[str, Any] = {}
        # Graphs share their memory, which torch only allows those that were captured on one stream.
        self.side: Any = torch.cuda.Stream() if self.features.is_cuda else None
        self.pool = torch.cuda.graph_pool_handle() if self.features.is_cuda else None
        self.beginning: tuple[Any, Any] = (None, None)  # a graph that makes the state, and the state
        self.shelves: dict[tuple[Any, ...], Shelf] = {}  # of captured scales, each by its index and more
        self.decoding: tuple[Any, Tensor, Tensor] | None = None  # a graph, the maps it reads, the pictures it makes
        self.arena = Arena(self.features.device, self.side)
        self.settled = False
        self.stream = rows * max(s.tokens for s in work.schedule) * work.backbone.width * 4  # bytes of the largest
        self.has_working_memory = False

    def make_working_memory(self) -> None:
        """In one piece, before graphs ask for it bit by bit: what early scales ask for is too small for later ones."""
        if self.settled and not self.has_working_memory:
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
        self.used = [0] * len(self.kv)
        self.memory.remember({})
        self.numbers.begin()
        work.policy.memory, work.policy.numbers = self.memory, self.numbers
        work.policy.experience = self.experience
        kv = [LayerCache(k, v, length) for (k, v), length in zip(self.kv, self.lengths, strict=True)]
        self.all_tokens.fill_(-1)
        return Run(work.backbone, state, self.features, work.schedule, guided, kv, self.tokens)

    def make_room(self, tokens: Sequence[int], kv: Sequence[LayerCache]) -> bool:
        """For so many tokens more in the cache of each layer. Whether it grew: then no graph knows its places."""
        if all(map(operator.le, map(operator.add, self.used, tokens), self.rooms)):
            return False
        grown = False
        for n, cache in enumerate(kv):
            missing = self.used[n] + tokens[n] - cache.k.shape[2]
            if missing <= 0:
                continue
            more = (0, 0, 0, max(missing, cache.k.shape[2] // (8 if self.settled else 2)))
            if cache.k.data_ptr() != self.kv[n][0].data_ptr():  # some rows have left, and the others moved together
                cache.k, cache.v = (torch.nn.functional.pad(t, more) for t in (cache.k, cache.v))
                continue
            k, v = (torch.nn.functional.pad(t, more) for t in self.kv[n])
            self.kv[n], self.rooms[n], rows = (k, v), k.shape[2], len(cache.k)
            cache.k, cache.v = k[:rows], v[:rows]
            grown = True
        if grown:
            wait_for(self.features.device)  # a graph may still be at work
            self.shelves.clear()
        return grown

    def make_tail(self, tokens: int, last: int) -> bool:
        """For so many tokens of the last scale. Whether it grew: then none of its graphs knows the place."""
        rows, heads, room, width = self.tail[0].shape
        if tokens <= room:
            return False
        wait_for(self.features.device)  # a graph may still be at work
        self.shelves = {key: shelf for key, shelf in self.shelves.items() if key[0] != last}
        self.tail = tuple(t.new_zeros(rows, heads, max(tokens, room + room // 8), width) for t in self.tail)
        return True

    def misses(self, rows: Rows, kv: Sequence[LayerCache]) -> bool:
        """Whether pictures rest, or rows between others have left: then nothing lies where a graph would look."""
        moved = kv[0].k.data_ptr() != self.kv[0][0].data_ptr()
        return rows.images < len(self.features) or rows.guided is not None or moved

    def left(self, last: bool) -> list[int]:
        """Room in the cache of each layer, or at the last scale."""
        if last:
            return [self.tail[0].shape[2]] * len(self.rooms)
        return list(map(operator.sub, self.rooms, self.used))

    def needed(self) -> list[int]:
        """Room that a call like the last one needs in the cache of each layer."""
        return list(map(with_room_to_spare, self.used))

    def settle(self, rooms: Sequence[int]) -> None:
        """It is known how large the caches have to be: put them side by side. No graph knows them there."""
        self.settled = True
        self.pool = torch.cuda.graph_pool_handle() if self.side is not None else None  # the old graphs' was larger
        places = self.memory.places
        assert places is not None
        kv = [(*k.shape[:2], room, k.shape[3]) for (k, _), room in zip(self.kv, rooms, strict=True)]
        kv.append((*self.tail[0].shape[:2], with_room_to_spare(self.longest), self.tail[0].shape[3]))
        dtype, names = self.kv[0][0].dtype, list(places.tensors)
        like: list[tuple[Sequence[int], torch.dtype]] = [(shape, dtype) for shape in kv for _ in "kv"]
        like += [(places.tensors[name].shape, places.tensors[name].dtype) for name in names]
        wait_for(self.features.device)  # a graph may still be at work
        self.shelves.clear()
        self.kv.clear()
        self.tail = ()
        places.tensors.clear()
        self.memory.remember({})
        if self.side is not None:
            torch.cuda.empty_cache()  # of what was too small or too large
        found = iter(self.arena.divide(like))
        *self.kv, self.tail = [(next(found), next(found)) for _ in kv]
        self.rooms = list(rooms)
        places.tensors.update({name: next(found) for name in names})

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
