"""Tensors at fixed addresses, which the graphs of one shape of call read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nextscale.cache.kv import KVCache
from nextscale.cache.paged import PAGE_SIZE, PagedKVCache, PagePool
from nextscale.engine.rng import PerImageNoise, StaticNoise
from nextscale.engine.state import GenerationState
from nextscale.methods.device_inputs import FetchedInputs
from nextscale.methods.token_cache import StaticMaps, TokenCaches
from nextscale.models.base import supports_packed
from nextscale.runtime.base import CallContext, ScaleBatch
from nextscale.runtime.cudagraph.memory_arena import MemoryArena

RESIDUAL_STREAMS = 2.5  # of the largest scale that graphs hold at once, about

Inputs = tuple[Tensor | None, ...]  # a condition, as its backbone has read it


class StaticBuffers:
    def __init__(self, call: CallContext, inputs: Inputs, state: GenerationState, arena: MemoryArena) -> None:
        assert isinstance(call.noise, PerImageNoise)
        self.arena = arena
        self.inputs: Inputs = tuple(None if t is None else t.clone() for t in inputs)
        self.features = state.features
        device, host_only = self.features.device, call.policy.capabilities.host_only
        layers, (rows, heads, _, width) = len(state.kv), state.kv[0].k.shape
        tokens, last = call.backbone.context + call.schedule.tokens, list(call.schedule)[-1].tokens
        # Keys and values of the last scale, of one layer at a time: nobody reads them later. Without a method they lie
        # behind the others, where torch's own attention finds them.
        capacity, behind = (tokens, 0) if host_only else (tokens - last, last)
        allocate, dtype = arena.allocator(), call.backbone.dtype
        self.last_scale_kv = tuple(allocate((2, rows, heads, behind, width), dtype))
        self.kv: list[tuple[Tensor, ...]] = []
        self.pages: PagePool | None = None  # instead, where tokens are pruned and kernels find the others there
        if not host_only and supports_packed(call.backbone) and layers > 1:
            self.pages = PagePool(layers, rows, (heads, PAGE_SIZE, width), capacity, dtype, device, allocate)
        else:
            self.kv = [tuple(allocate((2, rows, heads, capacity, width), dtype)) for _ in state.kv]
        self.kv_lengths = torch.zeros(layers, rows, dtype=torch.long, device=device)
        # What a scale changes, and a copy of it.
        self.mutable = self.features, self.kv_lengths, *(() if self.pages is None else (self.pages.taken,))
        self.saved = [t.clone() for t in self.mutable]
        self.all_tokens = torch.cat([t.flatten() for t in state.tokens])
        by_scale = self.all_tokens.split([t.numel() for t in state.tokens])
        self.tokens = [part.view(t.shape) for part, t in zip(by_scale, state.tokens, strict=True)]
        self.settings = call.sampling.stacked_settings().to(device)
        self.noise = StaticNoise(call.noise)
        self.memory = TokenCaches(StaticMaps(call.schedule, allocate))
        self.memory_layouts: dict[frozenset[Any], int] = {}
        self.uploads = FetchedInputs(len(call.schedule))
        self.active_rows = FetchedInputs(len(call.schedule))
        stream_bytes = rows * max(s.tokens for s in call.schedule) * call.backbone.width * 4
        self.workspace_bytes = int(RESIDUAL_STREAMS * stream_bytes)

    def load(self, call: CallContext, inputs: Inputs, guided: bool, conditioning: Any, cond: Any) -> GenerationState:
        """Write what a call begins with; the graph `conditioning` makes `cond` of its inputs."""
        assert isinstance(call.noise, PerImageNoise)
        for buffer, new in zip(self.inputs, inputs, strict=True):
            if buffer is not None and new is not None:
                buffer.copy_(new)
        conditioning.replay()
        self.settings.copy_(call.sampling.stacked_settings(pinned=self.settings.is_cuda), non_blocking=True)
        self.noise.begin(call.noise)
        self.features.zero_()
        self.kv_lengths.zero_()
        self.memory.load({})
        self.uploads.reset()
        call.policy.memory, call.policy.uploads = self.memory, self.uploads
        self.all_tokens.fill_(-1)
        kv = self.empty_caches()
        return GenerationState(call.backbone, cond, self.features, call.schedule, guided, kv, self.tokens, static=True)

    def empty_caches(self) -> list[KVCache]:
        if self.pages is None:
            return [KVCache(k, v, length) for (k, v), length in zip(self.kv, self.kv_lengths, strict=True)]
        self.pages.reset()
        return [PagedKVCache(self.pages, layer, length) for layer, length in enumerate(self.kv_lengths)]

    def upload_active_rows(self, batch: ScaleBatch) -> None:
        indices = batch.row_indices
        active = {*(range(len(batch.allocated.all)) if indices is None else indices.tolist())}
        rows = [float(row in active) for row in range(self.kv_lengths.shape[1])]
        self.active_rows.upload("rows", rows, self.features.device)
        self.active_rows.stage(batch.scale.index)

    def active_mask(self, batch: ScaleBatch) -> Tensor:
        """Fetch which rows are active, [R]."""
        self.active_rows.fetch(batch.scale.index)
        return self.active_rows["rows"][: len(batch.allocated.all)] > 0

    def memory_layout(self) -> int:
        """Number the addresses of all that the method remembers: a graph reads it there."""
        layout = frozenset(
            (name, e.grid, e.rows, e.maps.data_ptr()) for name, es in self.memory.entries().items() for e in es
        )
        return self.memory_layouts.setdefault(layout, len(self.memory_layouts))

    def snapshot(self) -> None:
        for copy, tensor in zip(self.saved, self.mutable, strict=True):
            copy.copy_(tensor)

    def rollback(self) -> None:
        """Undo what a scale has changed since the snapshot."""
        for copy, tensor in zip(self.saved, self.mutable, strict=True):
            tensor.copy_(copy)
