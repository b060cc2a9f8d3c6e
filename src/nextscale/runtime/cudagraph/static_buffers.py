"""What belongs to one shape of call when its scales are CUDA graphs: fixed places, and the graphs that know them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nextscale.cache.kv import LayerCache
from nextscale.cache.paged import PAGE, PagedCache, Pages
from nextscale.engine.rng import PerImageNoise, StaticNoise
from nextscale.engine.state import GenerationState
from nextscale.methods.device_inputs import FetchedInputs
from nextscale.methods.token_cache import Places, TokenCaches
from nextscale.models.base import takes_packed
from nextscale.runtime.cudagraph.capture import Captured
from nextscale.runtime.cudagraph.shared_memory import Ground
from nextscale.runtime.eager import CallContext, ScaleBatch

STREAMS = 2.5  # residual streams of the last scale that graphs hold at once, about

Inputs = tuple[Tensor | None, ...]  # a condition, as its backbone has read it


class Program:
    """Everything of one shape of call, at fixed places."""

    def __init__(self, call: CallContext, inputs: Inputs, run: GenerationState, ground: Ground) -> None:
        assert isinstance(call.draws, PerImageNoise)
        self.inputs: Inputs = tuple(None if t is None else t.clone() for t in inputs)
        self.features = run.features
        rows, heads, _, width = run.kv[0].k.shape
        tokens, last = call.backbone.context + call.schedule.tokens, list(call.schedule)[-1].tokens
        # Keys and values of the last scale, of one layer at a time: nobody reads them later. Without a method they lie
        # behind the others, where torch's own attention finds them.
        room, behind = (tokens, 0) if call.policy.passive else (tokens - last, last)
        take, dtype = ground.share(), call.backbone.dtype
        self.tail = tuple(take((2, rows, heads, behind, width), dtype))
        self.kv: list[tuple[Tensor, ...]] = []
        self.pages: Pages | None = None  # instead, where tokens are left out and kernels find the others there
        if not call.policy.passive and takes_packed(call.backbone) and len(run.kv) > 1:
            page = heads, PAGE, width
            self.pages = Pages(len(run.kv), rows, page, room, dtype, self.features.device, take)
        else:
            self.kv = [tuple(take((2, rows, heads, room, width), dtype)) for _ in run.kv]
        self.lengths = torch.zeros(len(run.kv), rows, dtype=torch.long, device=self.features.device)
        self.changed = self.features, self.lengths, *(() if self.pages is None else (self.pages.taken,))  # by a scale
        self.before = [now.clone() for now in self.changed]
        self.all_tokens = torch.cat([t.flatten() for t in run.tokens])
        parts = self.all_tokens.split([t.numel() for t in run.tokens])
        self.tokens = [part.view(t.shape) for part, t in zip(parts, run.tokens, strict=True)]
        self.settings = call.sampling.all_numbers().to(self.features.device)
        self.draws = StaticNoise(call.draws)
        self.memory = TokenCaches(Places(call.schedule, take))
        self.states: dict[frozenset[Any], int] = {}
        self.uploads = FetchedInputs(len(call.schedule))
        self.resting = FetchedInputs(len(call.schedule))  # which rows do not
        self.beginning: tuple[Any, Any] = (None, None)  # a graph that makes the state, and the state
        self.graphs: dict[tuple[Any, ...], Captured] = {}  # of scales
        stream = rows * max(s.tokens for s in call.schedule) * call.backbone.width * 4  # bytes of the largest
        self.working = int(STREAMS * stream)

    def load(self, call: CallContext, inputs: Inputs, images: int, guided: bool) -> GenerationState:
        """Put what a call begins with to the fixed places, and let it work there."""
        assert isinstance(call.draws, PerImageNoise)
        for place, given in zip(self.inputs, inputs, strict=True):
            if place is not None and given is not None:
                place.copy_(given)
        graph, cond = self.beginning
        graph.replay()
        self.settings.copy_(call.sampling.all_numbers(pinned=self.settings.is_cuda), non_blocking=True)
        self.draws.begin(call.draws)
        self.features.zero_()
        self.lengths.zero_()
        self.memory.remember({})
        self.uploads.reset()
        call.policy.memory, call.policy.uploads = self.memory, self.uploads
        self.all_tokens.fill_(-1)
        return GenerationState(
            call.backbone, cond, self.features, call.schedule, guided, self.caches(), self.tokens, stays=True
        )

    def caches(self) -> list[LayerCache]:
        """Empty ones."""
        if self.pages is None:
            return [LayerCache(k, v, length) for (k, v), length in zip(self.kv, self.lengths, strict=True)]
        self.pages.begin()
        return [PagedCache(self.pages, layer, length) for layer, length in enumerate(self.lengths)]

    def rest(self, batch: ScaleBatch) -> None:
        """Tell the scale which rows do not."""
        working = {*(batch.places.tolist() if batch.places is not None else range(len(batch.placed.all)))}
        rows = [float(row in working) for row in range(len(self.lengths[0]))]
        self.resting.upload("rows", rows, self.features.device)
        self.resting.stage(batch.scale.index)

    def at_work(self, batch: ScaleBatch) -> Tensor:
        """[R], on the device."""
        self.resting.fetch(batch.scale.index)
        return self.resting["rows"][: len(batch.placed.all)] > 0

    def cond(self) -> int:
        """A number for where all that the method remembers lies: a graph reads it there."""
        lies = frozenset(
            (name, e.grid, e.rows, e.maps.data_ptr()) for name, es in self.memory.entries().items() for e in es
        )
        return self.states.setdefault(lies, len(self.states))

    def save(self) -> None:
        for place, now in zip(self.before, self.changed, strict=True):
            place.copy_(now)

    def go_back(self) -> None:
        """To where `save` was called: as if the scale had not been run."""
        for place, now in zip(self.before, self.changed, strict=True):
            now.copy_(place)
