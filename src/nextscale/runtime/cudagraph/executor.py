"""A scale as one CUDA graph, so that the GPU never waits for the host to launch its kernels.

A graph reads and writes fixed places. They belong to a `Program`, one for every shape of call and method: state, KV
cache, maps, random numbers and what the method remembers are put there, graphs are replayed, results are copied out.

A method may keep another number of tokens in every layer and picture. A graph does not know how many: kernels read that
on the device. So there is one for each scale, whatever is decided.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nextscale
from nextscale.cache.kv import LayerCache
from nextscale.cache.paged import PagedCache
from nextscale.engine.rng import NoiseSource, PerImageNoise
from nextscale.engine.sampling import ScaleNumbers
from nextscale.engine.schedule import Scale
from nextscale.engine.state import GenerationState, not_finite
from nextscale.methods.base import ScaleContext
from nextscale.models.base import Backbone, takes_packed
from nextscale.models.offload import set_aside
from nextscale.models.packing import pack
from nextscale.runtime.cudagraph.capture import (
    Captured,
    Capturing,
    Chosen,
    GraphSegments,
    HostReadback,
    Recorded,
    Report,
)
from nextscale.runtime.cudagraph.shared_memory import Ground
from nextscale.runtime.cudagraph.static_buffers import Inputs, Program
from nextscale.runtime.decoder import FastDecode, pictures_at_once
from nextscale.runtime.eager import CallContext, Eager, ScaleBatch, ScaleOutput
from nextscale.tokenizers.base import ImageTokenizer

logger = logging.getLogger(__name__)

# Layers behind which a graph is cut: the first pieces are short, and hide how long the rest takes to launch.
CUTS = (1, 5)
MAX_PROGRAMS = 32  # shapes of calls whose graphs are kept
MIN_FREE = 0.25  # of the device's memory: with less, only the newest are


class Graphs(Eager):
    name = "graphs"
    overwrites = True
    text_slots = (64, 128, 256, 512)

    def __init__(self) -> None:
        self.fast_decode = FastDecode()
        self.program: Program | None = None  # of the call at work
        self.programs: dict[Hashable, Program] = {}  # by what is configured; the one that was used last comes last
        self.ground: Any = None  # what they share, a Ground
        self.decoders: dict[Hashable, tuple[Any, Tensor, Tensor]] = {}
        self.reason = ""  # why this call is not captured
        self.apart = False  # pictures of this call have run different scales
        self.ran: list[tuple[Scale, Captured]] = []  # captured scales of this call
        self.cond: int | None = None  # where the newest of them left what the method remembers
        self.reports: list[Report] = []  # of them
        self.captured = 0  # scales
        self.batches: set[int] = set()  # numbers of pictures that a warm-up was for
        self.grown = 0  # times that pages of a program's KV cache were not enough for a scale, and more were made
        self.refused: dict[Hashable, str] = {}  # methods that turned out to wait, and where
        self.capturing: Capturing | None = None

    def open(self, call: CallContext, inputs: Inputs, images: int, guided: bool) -> GenerationState:
        for report in self.reports:  # the call before may not have asked for all it can
            report.read()
        self.ran.clear()
        self.reports.clear()
        self.cond = None
        self.apart, self.reason = False, why_not(call) or self.refused.get(call.policy.structure, "")
        if self.reason:
            logger.info("no CUDA graphs: %s", self.reason)
            self.program = None
            return super().open(call, inputs, images, guided)
        shapes = tuple(None if t is None else (t.shape, t.dtype) for t in inputs)
        method = None if call.policy.passive else call.policy.structure
        sampling = call.sampling.structure(bits=bool(call.backbone.token_shape))
        key = (call.backbone, call.schedule, sampling, shapes, images, guided, method)
        self.program = self.programs.pop(key, None)
        if self.program is None:
            self.make_place(call.backbone.device)
            set_aside(call.tokenizer.encoder)  # `encode` fetches it
            pack(large_parts(call.backbone))
            run = super().open(call, inputs, images, guided)
            self.ground = self.ground or Ground(call.backbone.device)
            if run.features.is_cuda:
                self.record_decoders(call.tokenizer, run.features)  # first, for caches will lie where they work
            self.program = Program(call, inputs, run, self.ground)
            self.program.beginning = self.record_state(call, self.program)
        self.programs[key] = self.program
        run = self.program.load(call, inputs, images, guided)
        if self.rehearsing and self.program.pages is not None:
            self.program.pages.repeat()  # a rehearsal keeps more than other calls do
        return run

    def make_place(self, device: torch.device) -> None:
        """For another program: those that were not used for longest are let go if they are many or memory is scarce."""
        while self.programs and (len(self.programs) >= MAX_PROGRAMS or is_scarce(device)):
            del self.programs[next(iter(self.programs))]
            if not self.programs:  # nobody is left who shares it
                self.ground = None
                self.decoders.clear()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def forget_others(self) -> bool:
        others = [key for key, program in self.programs.items() if program is not self.program]
        for key in others:
            del self.programs[key]
        if others and not self.programs:
            self.forget()
        return bool(others)

    def record_state(self, call: CallContext, program: Program) -> tuple[Any, Any]:
        """A graph that makes the state from its inputs. It has been made before, so nothing is left to compile."""
        graph = GraphSegments(torch.cuda.graph_pool_handle())  # for itself: it stays when all others are captured anew
        torch.cuda.synchronize()
        with torch.cuda.stream(self.ground.side), graph.capturing():
            cond = call.backbone.prepare(program.inputs, call.schedule)
        torch.cuda.synchronize()
        return graph, cond

    def numbers(self, call: CallContext, scale: Scale) -> ScaleNumbers:
        if self.capturing is None or self.program is None:
            return super().numbers(call, scale)
        return ScaleNumbers(*self.program.settings[scale.index].unbind())

    def run_scale(
        self, call: CallContext, batch: ScaleBatch, features: Tensor, kv: Sequence[LayerCache]
    ) -> ScaleOutput:
        program, scale, plan, rests = self.program, batch.scale, batch.plan, batch.rows != batch.placed
        # What a method remembers of a picture that leaves out a scale has another grid than the others have.
        self.apart |= batch.returns and not call.policy.passive
        if self.reason or program is None or self.apart or (rests and not self.rests(call.backbone)):
            self.cond = None
            if program is not None:  # what was told lies in its places
                program.uploads.stage(scale.index)
                program.uploads.fetch(scale.index)
            leave_pages(kv)
            return super().run_scale(call, batch, features, kv)
        if features is not program.features:
            program.features.copy_(features)
        program.draws.refill(scale.index, range(len(features)))
        program.uploads.stage(scale.index)
        if rests:
            program.rest(batch)
        before = scale.start + (call.backbone.context if scale.index else 0)
        for cache in kv:
            if cache.used < before:  # some tokens were left out: how long rows are, the device knows
                cache.used, cache.length = before, cache.static_length
        if program.pages is not None and not ends(call, batch) and not self.rehearsing:
            new = tokens_of(call, scale)
            self.grown += program.pages.provide(new, before + new, len(batch.rows.all), self.pages_taken)
        cond = program.cond() if self.cond is None else self.cond
        uploaded = tuple(program.uploads.pending)
        any_ = (call.watched, scale.index, batch.placed, rests, plan.variant, plan.needs, cond, uploaded)
        # Where every layer leaves tokens out, or somebody rests, only the device knows how much of the caches is used.
        key = (*any_, tuple((cache.used, cache.length is None) for cache in kv))
        captured = program.graphs.get(any_) or program.graphs.get(key)
        if captured is None:
            try:
                captured = self.capture(program, call, batch, kv)
            except Waiting as waiting:
                self.refused[call.policy.structure] = self.reason = str(waiting)
                logger.warning("%s %s, so its scales are not captured", call.policy.name or "the method", waiting)
                leave_pages(kv)
                return super().run_scale(call, batch, features, kv)
            program.graphs[any_ if rests or captured.made.chosen.everywhere else key] = captured
        self.ran.append((scale, captured))
        return self.replay(program, call, batch, kv, captured)

    def pages_taken(self) -> int:
        """Behind the newest scale of this call, which is waited for."""
        return self.reports[-1].pages if self.reports else 0

    def replay(
        self, program: Program, call: CallContext, batch: ScaleBatch, kv: Sequence[LayerCache], captured: Captured
    ) -> ScaleOutput:
        scale, made = batch.scale, captured.made
        captured.graph.replay()
        # While the device is at work: the numbers of the next scale, and what has to outlive this one.
        program.draws.refill(scale.index + 1, range(len(program.features)))
        program.memory.remember(made.memory)
        for cache, level in zip(kv, made.level, strict=True):
            cache.used += tokens_of(call, scale)
            cache.length = None if level else cache.static_length
        self.cond = made.cond
        places = batch.places
        self.reports.append(Report(made.readback, captured.graph.wait, None if places is None else batch.rows.which))
        chosen, before, output = made.chosen.copied(places), made.output.ctx, made.output
        if places is not None and call.watched:
            at = places.to(output.raw.device)
            logits = output.logits[at[: batch.rows.images]]
            output = dataclasses.replace(output, logits=logits, raw=output.raw[at], hidden=output.hidden[at])
        return dataclasses.replace(
            output,
            features=program.features.clone() if call.watched else program.features,
            tokens=program.tokens[scale.index],
            ctx=ScaleContext(scale, batch.rows, before.logit_lens, chosen, context=before.context),
            report=self.reports[-1],
        )

    def capture(self, program: Program, call: CallContext, batch: ScaleBatch, kv: Sequence[LayerCache]) -> Captured:
        kv = [copy.copy(cache) for cache in kv]
        rests, batch = batch.rows != batch.placed, dataclasses.replace(batch, rows=batch.placed)  # all, whoever rests
        if ends(call, batch):
            k, v = (t[: len(kv[0].k)] for t in program.tail)
            for cache in kv:
                cache.tail = k, v
        used, lengths, remembered = kv[0].used, [cache.length for cache in kv], program.memory.entries()
        call = dataclasses.replace(call, draws=program.draws)
        readback: HostReadback | None = None

        def run(pieces: GraphSegments | None = None) -> Recorded:
            nonlocal readback
            program.uploads.fetch(batch.scale.index)
            program.memory.remember(remembered)
            for cache, length in zip(kv, lengths, strict=True):
                cache.used, cache.length = used, length
            taken = None if program.pages is None else program.pages.taken[-1:]
            self.capturing = Capturing(pieces, readback, taken, at_work=program.at_work(batch) if rests else None)
            try:
                output = super(Graphs, self).run_scale(call, batch, program.features, kv)
                readback = self.capturing.readback
            finally:
                self.capturing = None
            assert readback is not None
            program.tokens[batch.scale.index].copy_(output.tokens)
            if not call.watched:  # nobody asks for them, and they would take the memory of every scale
                nothing = output.logits.new_empty(0)
                output = dataclasses.replace(output, logits=nothing, raw=nothing, hidden=nothing)
            memory, cond = program.memory.entries(), program.cond()
            chosen = Chosen.of(output.ctx.chosen, batch.scale.tokens)
            return Recorded(output, chosen, readback, memory, [cache.length is None for cache in kv], cond)

        program.save()
        if not type(call.policy).__module__.startswith("nextscale.") and program.features.is_cuda:
            require_no_wait(run, program, remembered)
        self.captured += 1
        graph, made = self.record(run, program)
        program.memory.remember(remembered)  # nothing has been run yet
        return Captured(graph, made)

    def record(self, run: Callable[..., Recorded], program: Program) -> tuple[Any, Recorded]:
        """A graph whose replay is `run` with its maps put to their fixed place, and what `run` returns."""
        side = self.ground.side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, measures, loads: nothing of that may be captured
            run()
        torch.cuda.current_stream().wait_stream(side)
        program.go_back()
        torch.cuda.synchronize()
        pieces = GraphSegments(self.ground.pool)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), pieces.capturing():
            self.ground.make_working_memory(program.working)
            made = run(pieces)
            program.features.copy_(made.output.features)
        torch.cuda.current_stream().wait_stream(side)
        return pieces, made

    def warmed(self, batches: Sequence[int]) -> None:
        self.batches.update(batches)

    def forget(self) -> None:
        self.batches.clear()
        self.program = self.ground = None
        self.programs.clear()
        self.decoders.clear()
        self.ran.clear()
        self.reports.clear()  # an unread one knows its graph

    @property
    def is_capturing(self) -> bool:
        return self.capturing is not None

    def at_work(self) -> Tensor | None:
        return None if self.capturing is None else self.capturing.at_work

    def rests(self, backbone: Backbone) -> bool:
        return takes_packed(backbone) or backbone.device.type == "cpu"  # where captures are emulated

    def places(self, images: int, backbone: Backbone, draws: NoiseSource, forced: Sequence[Tensor]) -> int:
        """A batch is filled up with rows that rest if a warm-up was for one that is not much larger. Graphs of its own
        would be faster by a tenth, or a fifth without a method: complete scales in which nobody rests are cuBLAS's."""
        if not isinstance(draws, PerImageNoise) or forced or not self.rests(backbone):
            return images
        return min((n for n in self.batches if images <= n <= 2 * images), default=images)

    def layer_done(self, layer: int) -> None:
        if self.capturing is not None and self.capturing.pieces is not None and layer in CUTS:
            self.capturing.pieces.cut()

    def require_finite(self, raw: Tensor, logits: Tensor, scale: Scale, backbone: Any) -> None:
        """Reading a number would make the host wait: `check` does it, later."""
        if self.capturing is None:
            super().require_finite(raw, logits, scale, backbone)
        else:
            self.capturing.largest = torch.stack(torch._foreach_norm([logits, raw], math.inf))

    def on_report_ready(self, report: dict[str, Tensor]) -> None:
        if self.capturing is not None:
            self.capturing.tell(report)

    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        """As many pictures at a time as there is a graph for."""
        made = []
        while len(features):
            sizes = [n for n in powers_of_two(len(features)) if (tokenizer, (n, *features.shape[1:])) in self.decoders]
            if not sizes:
                made.append(self.fast_decode(tokenizer, features))
                break
            graph, place, pictures = self.decoders[tokenizer, (sizes[-1], *features.shape[1:])]
            with torch.inference_mode():
                place.copy_(features[: sizes[-1]])
                graph.replay()
            made.append(pictures.clone())
            features = features[sizes[-1] :]
        return made[0] if len(made) == 1 else torch.cat(made)

    def record_decoders(self, tokenizer: ImageTokenizer, features: Tensor) -> None:
        """For 1, 2, 4, ... maps like these, so that they add up to any number of pictures."""
        for n in powers_of_two(min(len(features), pictures_at_once(tokenizer.decoder, features))):
            if (tokenizer, (n, *features.shape[1:])) not in self.decoders:
                self.record_decoder(tokenizer, features[:n])

    def record_decoder(self, tokenizer: ImageTokenizer, features: Tensor) -> None:
        """For so many maps like these: a graph, the maps it reads, the pictures it makes."""
        place = torch.zeros_like(features)
        pictures = self.fast_decode(tokenizer, place)  # measures, loads
        torch.cuda.synchronize()
        with torch.cuda.stream(self.ground.side):
            graph = GraphSegments(self.ground.reserve.id)
            with graph.capturing():
                pictures.copy_(self.fast_decode(tokenizer, place))
        torch.cuda.synchronize()
        self.decoders[tokenizer, tuple(features.shape)] = graph, place, pictures

    def check(self, backbone: Backbone) -> None:
        for scale, captured in self.ran:
            captured.graph.wait()
            guided, raw = captured.made.readback.largest
            if not math.isfinite(guided):
                raise not_finite(math.isfinite(raw), scale, backbone)


class Waiting(Exception):
    """A method waits for the device."""


def require_no_wait(run: Callable[..., Recorded], program: Program, remembered: dict[Hashable, Any]) -> None:
    """Of a method that is not ours we cannot know. A capture would fail there, and leave a device that is of no use."""
    for mode in ("default", "error"):  # kernels are compiled the first time, which waits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a prototype
            torch.cuda.set_sync_debug_mode(mode)
        try:
            run()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            ours = str(Path(nextscale.__file__).parent), str(Path(torch.__file__).parent)
            places = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
            where = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
            raise Waiting(f"waits for the device inside a scale{where}") from None
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            program.go_back()
            program.memory.remember(remembered)


def powers_of_two(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]


def is_scarce(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free < MIN_FREE * total


def large_parts(backbone: Backbone) -> list[nn.Module]:
    return [*backbone.blocks, *(m for m in backbone.children() if m is not backbone.blocks)]


def leave_pages(kv: Sequence[LayerCache]) -> None:
    """For scales that are not captured: these know no pages."""
    assert isinstance(kv, list)
    kv[:] = [cache.copied() if isinstance(cache, PagedCache) else cache for cache in kv]


def ends(call: CallContext, batch: ScaleBatch) -> bool:
    """Whether no layer has to keep what it stores: nobody reads it later."""
    return batch.scale.index == len(call.schedule) - 1 and not call.policy.passive


def tokens_of(call: CallContext, scale: Scale) -> int:
    """That a row has at most."""
    return scale.tokens + (0 if scale.index else call.backbone.context)


def why_not(call: CallContext) -> str:
    """What in this call cannot be captured."""
    if not isinstance(call.draws, PerImageNoise):
        return "random numbers come from the caller's generator"
    if call.forced:
        return "tokens are forced"
    if not call.policy.passive and not call.policy.capturable:
        return "the method waits for the device inside a scale"
    if not call.policy.passive and call.policy.structure is None:
        return "the policy does not say its method"
    if not call.policy.passive and call.backbone.device.type == "cuda" and not takes_packed(call.backbone):
        return "layers in float32, or with heads of this width, have no kernels for tokens that a method keeps"
    return ""
