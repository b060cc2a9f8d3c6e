"""Every scale as one CUDA graph, so that the GPU never waits for the host to launch its kernels.

A graph reads and writes static buffers, one set for every shape of call and method: inputs, KV cache, features, noise
and what the method remembers are written there, graphs are replayed, results are copied out.

A method may keep another number of tokens in every layer and image. A graph does not know how many: kernels read that
on the device. So there is one for each scale, whatever is decided.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from nextscale.cache.kv import KVCache
from nextscale.cache.paged import PagedKVCache
from nextscale.engine.rng import NoiseSource, PerImageNoise
from nextscale.engine.schedule import Scale
from nextscale.engine.state import GenerationState, not_finite
from nextscale.methods.policy import ScaleContext
from nextscale.models.base import Backbone, supports_packed
from nextscale.models.flat_parameters import flatten_parameters
from nextscale.models.offload import to_host
from nextscale.runtime.base import CallContext, ScaleBatch, ScaleOutput
from nextscale.runtime.cudagraph.capture import StaticScale, is_unread
from nextscale.runtime.cudagraph.decoder_graphs import DecoderGraphs
from nextscale.runtime.cudagraph.graph_cache import CallGraphs, CapturedScale, GraphKey
from nextscale.runtime.cudagraph.memory_arena import MemoryArena, is_scarce
from nextscale.runtime.cudagraph.readback import PendingReport
from nextscale.runtime.cudagraph.recorder import CUDARecorder
from nextscale.runtime.cudagraph.static_buffers import Inputs, StaticBuffers
from nextscale.runtime.cudagraph.sync_detection import SyncDetected, uncapturable_reason
from nextscale.runtime.eager import Eager
from nextscale.tokenizers.base import ImageTokenizer

logger = logging.getLogger(__name__)

MAX_CALL_SHAPES = 32  # whose graphs are kept


class CUDAGraphExecutor(Eager):
    name = "graphs"
    overwrites = True
    text_buckets = (64, 128, 256, 512)

    def __init__(self) -> None:
        self.recorder = CUDARecorder()
        self.decode_graphs = DecoderGraphs()
        self.arena: MemoryArena | None = None  # shared by all shapes of calls
        self.cache: dict[Hashable, CallGraphs] = {}  # the least recently used first
        self.current: CallGraphs | None = None  # of the current call
        self.replayed: list[tuple[Scale, CapturedScale]] = []  # in this call,
        self.reports: list[PendingReport] = []  # of these,
        self.memory_layout: int | None = None  # and where the newest of them left what the method remembers
        self.reason = ""  # why this call is not captured
        self.diverged = False  # images of this call have run different scales
        self.captured = 0
        self.warm_batches: set[int] = set()  # numbers of images that a warm-up was for
        self.grown = 0
        self.synchronizing: dict[Hashable, str] = {}  # methods that turned out to wait for the device, and where

    def open(self, call: CallContext, inputs: Inputs, images: int, guided: bool) -> GenerationState:
        for report in self.reports:  # the call before may not have asked for all it can
            report.read()
        self.replayed.clear()
        self.reports.clear()
        self.memory_layout, self.diverged, self.current = None, False, None
        self.reason = uncapturable_reason(call) or self.synchronizing.get(call.policy.capabilities.graph_key, "")
        if self.reason:
            logger.info("no CUDA graphs: %s", self.reason)
            return super().open(call, inputs, images, guided)
        sampling = call.sampling.graph_key(bits=bool(call.backbone.token_shape))
        shapes = tuple(None if t is None else (t.shape, t.dtype) for t in inputs)
        capabilities = call.policy.capabilities
        method = None if capabilities.host_only else capabilities.graph_key
        key = (call.backbone, call.schedule, sampling, shapes, images, guided, method)
        self.current = self.cache.pop(key, None) or self.make_graphs(call, inputs, images, guided)
        self.cache[key] = self.current
        buffers = self.current.buffers
        state = buffers.load(call, inputs, guided, *self.current.conditioning)
        if self.warming_up and buffers.pages is not None:
            buffers.pages.repeat_pages()  # a warm-up keeps more than other calls do
        return state

    def make_graphs(self, call: CallContext, inputs: Inputs, images: int, guided: bool) -> CallGraphs:
        backbone, tokenizer = call.backbone, call.tokenizer
        self.evict(backbone.device)
        to_host(tokenizer.encoder)  # `encode` fetches it
        flatten_parameters([*backbone.blocks, *(m for m in backbone.children() if m is not backbone.blocks)])
        state = super().open(call, inputs, images, guided)
        self.arena = self.arena or MemoryArena(backbone.device)
        if state.features.is_cuda:  # first, for caches will lie where decoders work
            self.decode_graphs.capture_all(tokenizer, state.features, self.arena)
        buffers = StaticBuffers(call, inputs, state, self.arena)
        return CallGraphs(buffers, self.recorder.capture_conditioning(call, buffers))

    def evict(self, device: torch.device) -> None:
        """Let go of the least recently used graphs while there are too many for another shape, or memory is scarce."""
        while self.cache and (len(self.cache) >= MAX_CALL_SHAPES or is_scarce(device)):
            del self.cache[next(iter(self.cache))]
            if not self.cache:  # nothing is left that shares it
                self.arena = None
                self.decode_graphs.clear()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def forget_others(self) -> bool:
        others = [key for key, graphs in self.cache.items() if graphs is not self.current]
        for key in others:
            del self.cache[key]
        if others and not self.cache:
            self.forget()
        return bool(others)

    def forget(self) -> None:
        self.warm_batches.clear()
        self.current = self.arena = None
        self.cache.clear()
        self.decode_graphs.clear()
        self.replayed.clear()
        self.reports.clear()  # an unread one knows its graph

    def run_scale(self, call: CallContext, batch: ScaleBatch, features: Tensor, kv: Sequence[KVCache]) -> ScaleOutput:
        graphs, scale, has_inactive_rows = self.current, batch.scale, batch.rows != batch.allocated
        # What a method remembers of an image that leaves out a scale has another grid than the others have.
        self.diverged |= batch.returns and not call.policy.capabilities.host_only
        supported = not has_inactive_rows or self.supports_inactive_rows(call.backbone)
        if self.reason or graphs is None or self.diverged or not supported:
            self.memory_layout = None
            if graphs is not None:  # the policy reads its uploads from the buffers
                graphs.buffers.uploads.stage(scale.index)
                graphs.buffers.uploads.fetch(scale.index)
            return self.run_uncaptured(call, batch, features, kv)
        buffers = graphs.buffers
        if features is not buffers.features:
            buffers.features.copy_(features)
        buffers.noise.refill(scale.index, range(len(features)))
        buffers.uploads.stage(scale.index)
        if has_inactive_rows:
            buffers.upload_active_rows(batch)
        before = scale.start + (call.backbone.context if scale.index else 0)
        for cache in kv:
            if cache.max_length < before:  # some tokens were pruned: how long rows are, the device knows
                cache.max_length, cache.row_lengths = before, cache.static_lengths
        if buffers.pages is not None and not is_unread(call, batch) and not self.warming_up:
            new = new_tokens(call, scale)
            self.grown += buffers.pages.ensure_free(new, before + new, len(batch.rows.all), self.pages_taken)
        key = self.graph_key(graphs, call, batch, kv)
        unknown_lengths = dataclasses.replace(key, kv_lengths=None)
        captured = graphs.scales.get(unknown_lengths) or graphs.scales.get(key)
        if captured is None:
            try:
                captured = self.capture(graphs, call, batch, kv)
            except SyncDetected as error:
                self.synchronizing[call.policy.capabilities.graph_key] = self.reason = str(error)
                logger.warning("%s %s, so its scales are not captured", call.policy.name or "the method", error)
                return self.run_uncaptured(call, batch, features, kv)
            unknown = has_inactive_rows or captured.outputs.selections.all_layers_pruned
            graphs.scales[unknown_lengths if unknown else key] = captured
        self.replayed.append((scale, captured))
        return self.replay(graphs, call, batch, kv, captured)

    def run_uncaptured(
        self, call: CallContext, batch: ScaleBatch, features: Tensor, kv: Sequence[KVCache]
    ) -> ScaleOutput:
        assert isinstance(kv, list)  # eager scales know no pages
        kv[:] = [cache.without_pages() if isinstance(cache, PagedKVCache) else cache for cache in kv]
        return super().run_scale(call, batch, features, kv)

    def graph_key(self, graphs: CallGraphs, call: CallContext, batch: ScaleBatch, kv: Sequence[KVCache]) -> GraphKey:
        plan, uploads, layout = batch.plan, tuple(graphs.buffers.uploads.pending), self.memory_layout
        rows, has_inactive_rows = batch.allocated, batch.rows != batch.allocated
        layout = graphs.buffers.memory_layout() if layout is None else layout
        kv_lengths = tuple((cache.max_length, cache.row_lengths is None) for cache in kv)
        scale = batch.scale.index, call.watched
        return GraphKey(*scale, rows, has_inactive_rows, plan.variant, plan.needs, layout, uploads, kv_lengths)

    def pages_taken(self) -> int:
        """Wait for how many pages are taken behind the newest scale of this call."""
        return self.reports[-1].pages if self.reports else 0

    def replay(
        self, graphs: CallGraphs, call: CallContext, batch: ScaleBatch, kv: Sequence[KVCache], captured: CapturedScale
    ) -> ScaleOutput:
        scale, outputs, buffers = batch.scale, captured.outputs, graphs.buffers
        captured.graph.replay()
        # While the device is at work: the noise of the next scale, and what has to outlive this one.
        buffers.noise.refill(scale.index + 1, range(len(buffers.features)))
        buffers.memory.load(outputs.memory)
        for cache, uniform in zip(kv, outputs.uniform_length, strict=True):
            cache.max_length += new_tokens(call, scale)
            cache.row_lengths = None if uniform else cache.static_lengths
        self.memory_layout = outputs.memory_layout
        rows = batch.row_indices  # None = all
        images = None if rows is None else batch.rows.image_ids
        self.reports.append(PendingReport(outputs.readback, captured.graph.wait, images))
        output, ctx, chosen = outputs.output, outputs.output.ctx, outputs.selections.copied(rows)
        if rows is not None and call.watched:
            at = rows.to(output.raw.device)
            logits = output.logits[at[: batch.rows.images]]
            output = dataclasses.replace(output, logits=logits, raw=output.raw[at], hidden=output.hidden[at])
        return dataclasses.replace(
            output,
            features=buffers.features.clone() if call.watched else buffers.features,
            tokens=buffers.tokens[scale.index],
            ctx=ScaleContext(scale, batch.rows, ctx.logit_lens, chosen, context=ctx.context),
            report=self.reports[-1],
        )

    def capture(self, graphs: CallGraphs, call: CallContext, batch: ScaleBatch, kv: Sequence[KVCache]) -> CapturedScale:
        scale, buffers = StaticScale(graphs.buffers, call, batch, kv), graphs.buffers
        buffers.snapshot()
        try:
            captured = self.recorder.capture_scale(scale)
        finally:
            buffers.memory.load(scale.remembered)  # nothing has been run yet
        self.captured += 1
        return captured

    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        return self.decode_graphs(tokenizer, features)

    def preview(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        return self.decode_graphs.without_graphs(tokenizer, features)

    def check(self, backbone: Backbone) -> None:
        for scale, captured in self.replayed:
            captured.graph.wait()
            guided, raw = captured.outputs.readback.max_logits
            if not math.isfinite(guided):
                raise not_finite(math.isfinite(raw), scale, backbone)

    def supports_inactive_rows(self, backbone: Backbone) -> bool:
        return supports_packed(backbone) or backbone.device.type == "cpu"  # where captures are emulated

    def padded_batch(self, images: int, backbone: Backbone, noise: NoiseSource, forced_tokens: Sequence[Tensor]) -> int:
        """Pad a batch with inactive rows if a warm-up was for one that is not much larger. Graphs of its own would be
        faster by a tenth, or a fifth without a method: complete scales without inactive rows run in cuBLAS."""
        if not isinstance(noise, PerImageNoise) or forced_tokens or not self.supports_inactive_rows(backbone):
            return images
        return min((n for n in self.warm_batches if images <= n <= 2 * images), default=images)

    def on_warmed_up(self, batches: Sequence[int]) -> None:
        self.warm_batches.update(batches)


def new_tokens(call: CallContext, scale: Scale) -> int:
    """Count what a scale adds to a row at most."""
    return scale.tokens + (0 if scale.index else call.backbone.context)
