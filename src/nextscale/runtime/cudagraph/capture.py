"""The eager code of a scale, so that it can be captured: on static buffers, and without waiting for the device."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nextscale.cache.kv import KVCache
from nextscale.engine.sampling import ScaleSettings
from nextscale.engine.schedule import Scale
from nextscale.runtime.base import CallContext, ScaleBatch
from nextscale.runtime.cudagraph.graph_cache import StaticOutputs
from nextscale.runtime.cudagraph.readback import HostReadback, SelectionRecord
from nextscale.runtime.cudagraph.segments import GraphSegments
from nextscale.runtime.cudagraph.static_buffers import StaticBuffers
from nextscale.runtime.eager import Eager

SPLIT_AFTER = (1, 5)  # layers: the first segments are short, and hide how long the rest takes to launch


class StaticScale(Eager):
    """A function that runs one scale on static buffers, again and again."""

    is_capturing = True

    def __init__(self, buffers: StaticBuffers, call: CallContext, batch: ScaleBatch, kv: Sequence[KVCache]) -> None:
        self.buffers, self.kv = buffers, [copy.copy(cache) for cache in kv]
        self.call = dataclasses.replace(call, noise=buffers.noise)
        self.batch = dataclasses.replace(batch, rows=batch.allocated)  # all: a mask says which are active
        self.has_inactive_rows = batch.rows != batch.allocated
        if is_unread(call, batch):
            k, v = (t[: len(kv[0].k)] for t in buffers.last_scale_kv)
            for cache in self.kv:
                cache.last_scale_kv = k, v
        self.max_length, self.row_lengths = kv[0].max_length, [cache.row_lengths for cache in kv]
        self.remembered = buffers.memory.entries()
        self.segments: GraphSegments | None = None  # while it is captured
        self.mask: Tensor | None = None  # [R], True for active rows; None = all
        self.max_logits: Tensor | None = None
        self.readback: HostReadback | None = None  # made at the first run: its memory has to be there before a capture

    def __call__(self, segments: GraphSegments | None = None) -> StaticOutputs:
        buffers, scale, self.segments = self.buffers, self.batch.scale, segments
        buffers.uploads.fetch(scale.index)
        buffers.memory.load(self.remembered)
        for cache, lengths in zip(self.kv, self.row_lengths, strict=True):
            cache.max_length, cache.row_lengths = self.max_length, lengths
        self.mask = buffers.active_mask(self.batch) if self.has_inactive_rows else None
        output = self.run_scale(self.call, self.batch, buffers.features, self.kv)
        assert self.readback is not None
        self.segments = self.mask = self.max_logits = None  # a run holds no memory while the next one is captured
        buffers.tokens[scale.index].copy_(output.tokens)
        if not self.call.watched:  # nobody asks for them, and they would take the memory of every scale
            empty = output.logits.new_empty(0)
            output = dataclasses.replace(output, logits=empty, raw=empty, hidden=empty)
        selections = SelectionRecord.of(output.ctx.chosen, scale.tokens)
        memory, uniform_length = buffers.memory.entries(), [cache.row_lengths is None for cache in self.kv]
        return StaticOutputs(output, selections, self.readback, memory, buffers.memory_layout(), uniform_length)

    def scale_settings(self, call: CallContext, batch: ScaleBatch) -> ScaleSettings:
        settings = ScaleSettings(*self.buffers.settings[batch.scale.index].unbind())
        if self.mask is None or not batch.rows.unconditional:
            return settings
        # Of every image: 1 where its unconditional row is inactive.
        weight = torch.where(self.mask[batch.rows.images :], settings.weight, 1.0)
        return settings._replace(weight=weight)

    def active_mask(self) -> Tensor | None:
        return self.mask

    def layer_done(self, layer: int) -> None:
        if self.segments is not None and layer in SPLIT_AFTER:
            self.segments.split()

    def require_finite(self, call: CallContext, raw: Tensor, logits: Tensor, scale: Scale) -> None:
        """Leave it to `CUDAGraphExecutor.check`: reading a number would make the host wait."""
        self.max_logits = torch.stack(torch._foreach_norm([logits, raw], math.inf))

    def on_report_ready(self, report: dict[str, Tensor]) -> None:
        """Write all that the host will read."""
        assert self.max_logits is not None
        pages = None if self.buffers.pages is None else self.buffers.pages.taken[-1:]
        self.readback = self.readback or HostReadback(report, self.max_logits, pages)
        self.readback.write(report, self.max_logits, pages)
        if self.segments is not None:
            self.segments.mark_ready()


def is_unread(call: CallContext, batch: ScaleBatch) -> bool:
    """Whether no later scale reads what this one stores in KV caches, so that these need not hold it."""
    return batch.scale.index == len(call.schedule) - 1 and not call.policy.capabilities.host_only
