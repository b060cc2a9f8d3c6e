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
from nextscale.engine.rng import Draws, PerImageDraws
from nextscale.engine.sampling import ScaleNumbers
from nextscale.engine.schedule import Scale
from nextscale.engine.state import Run, not_finite
from nextscale.methods.base import Stats
from nextscale.models.base import Backbone, takes_packed
from nextscale.models.offload import set_aside
from nextscale.models.packing import pack
from nextscale.runtime.cudagraph.capture import Captured, Capturing, Chosen, Pieces, Recorded, Report, Told
from nextscale.runtime.cudagraph.shared_memory import Ground
from nextscale.runtime.cudagraph.static_buffers import Inputs, Program
from nextscale.runtime.decoder import FastDecode, pictures_at_once
from nextscale.runtime.eager import Eager, Step, Task, Work
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
        self.state: int | None = None  # where the newest of them left what the method remembers
        self.reports: list[Report] = []  # of them
        self.captured = 0  # scales
        self.batches: set[int] = set()  # numbers of pictures that a warm-up was for
        self.grown = 0  # times that pages of a program's KV cache were not enough for a scale, and more were made
        self.refused: dict[Hashable, str] = {}  # methods that turned out to wait, and where
        self.capturing: Capturing | None = None

    def open(self, work: Work, inputs: Inputs, images: int, guided: bool) -> Run:
        for report in self.reports:  # the call before may not have asked for all it can
            report.read()
        self.ran.clear()
        self.reports.clear()
        self.state = None
        self.apart, self.reason = False, why_not(work) or self.refused.get(work.policy.structure, "")
        if self.reason:
            logger.info("no CUDA graphs: %s", self.reason)
            self.program = None
            return super().open(work, inputs, images, guided)
        shapes = tuple(None if t is None else (t.shape, t.dtype) for t in inputs)
        method = None if work.policy.passive else work.policy.structure
        sampling = work.sampling.structure(bits=bool(work.backbone.token_shape))
        key = (work.backbone, work.schedule, sampling, shapes, images, guided, method)
        self.program = self.programs.pop(key, None)
        if self.program is None:
            self.make_place(work.backbone.device)
            set_aside(work.tokenizer.encoder)  # `encode` fetches it
            pack(large_parts(work.backbone))
            run = super().open(work, inputs, images, guided)
            self.ground = self.ground or Ground(work.backbone.device)
            if run.features.is_cuda:
                self.record_decoders(work.tokenizer, run.features)  # first, for caches will lie where they work
            self.program = Program(work, inputs, run, self.ground)
            self.program.beginning = self.record_state(work, self.program)
        self.programs[key] = self.program
        run = self.program.load(work, inputs, images, guided)
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

    def record_state(self, work: Work, program: Program) -> tuple[Any, Any]:
        """A graph that makes the state from its inputs. It has been made before, so nothing is left to compile."""
        graph = Pieces(torch.cuda.graph_pool_handle())  # for itself: it stays when all others are captured anew
        torch.cuda.synchronize()
        with torch.cuda.stream(self.ground.side), graph.capturing():
            state = work.backbone.prepare(program.inputs, work.schedule)
        torch.cuda.synchronize()
        return graph, state

    def numbers(self, work: Work, scale: Scale) -> ScaleNumbers:
        if self.capturing is None or self.program is None:
            return super().numbers(work, scale)
        return ScaleNumbers(*self.program.settings[scale.index].unbind())

    def run_scale(self, work: Work, task: Task, features: Tensor, kv: Sequence[LayerCache]) -> Step:
        program, scale, plan, rests = self.program, task.scale, task.plan, task.rows != task.placed
        # What a method remembers of a picture that leaves out a scale has another grid than the others have.
        self.apart |= task.returns and not work.policy.passive
        if self.reason or program is None or self.apart or (rests and not self.rests(work.backbone)):
            self.state = None
            if program is not None:  # what was told lies in its places
                program.numbers.put(scale.index)
                program.numbers.fetch(scale.index)
            leave_pages(kv)
            return super().run_scale(work, task, features, kv)
        if features is not program.features:
            program.features.copy_(features)
        program.draws.refill(scale.index, range(len(features)))
        program.numbers.put(scale.index)
        if rests:
            program.rest(task)
        before = scale.start + (work.backbone.context if scale.index else 0)
        for cache in kv:
            if cache.used < before:  # some tokens were left out: how long rows are, the device knows
                cache.used, cache.length = before, cache.length_place
        if program.pages is not None and not ends(work, task) and not self.rehearsing:
            new = tokens_of(work, scale)
            self.grown += program.pages.provide(new, before + new, len(task.rows.all), self.pages_taken)
        state = program.state() if self.state is None else self.state
        told = tuple(program.numbers.told)
        any_ = (work.watched, scale.index, task.placed, rests, plan.variant, plan.needs, state, told)
        # Where every layer leaves tokens out, or somebody rests, only the device knows how much of the caches is used.
        key = (*any_, tuple((cache.used, cache.length is None) for cache in kv))
        captured = program.graphs.get(any_) or program.graphs.get(key)
        if captured is None:
            try:
                captured = self.capture(program, work, task, kv)
            except Waiting as waiting:
                self.refused[work.policy.structure] = self.reason = str(waiting)
                logger.warning("%s %s, so its scales are not captured", work.policy.name or "the method", waiting)
                leave_pages(kv)
                return super().run_scale(work, task, features, kv)
            program.graphs[any_ if rests or captured.made.chosen.everywhere else key] = captured
        self.ran.append((scale, captured))
        return self.replay(program, work, task, kv, captured)

    def pages_taken(self) -> int:
        """Behind the newest scale of this call, which is waited for."""
        return self.reports[-1].pages if self.reports else 0

    def replay(self, program: Program, work: Work, task: Task, kv: Sequence[LayerCache], captured: Captured) -> Step:
        scale, made = task.scale, captured.made
        captured.graph.replay()
        # While the device is at work: the numbers of the next scale, and what has to outlive this one.
        program.draws.refill(scale.index + 1, range(len(program.features)))
        program.memory.remember(made.memory)
        for cache, level in zip(kv, made.level, strict=True):
            cache.used += tokens_of(work, scale)
            cache.length = None if level else cache.length_place
        self.state = made.state
        places = task.places
        self.reports.append(Report(made.told, captured.graph.wait, None if places is None else task.rows.which))
        chosen, before, step = made.chosen.copied(places), made.step.stats, made.step
        if places is not None and work.watched:
            at = places.to(step.raw.device)
            logits = step.logits[at[: task.rows.images]]
            step = dataclasses.replace(step, logits=logits, raw=step.raw[at], hidden=step.hidden[at])
        return dataclasses.replace(
            step,
            features=program.features.clone() if work.watched else program.features,
            tokens=program.tokens[scale.index],
            stats=Stats(scale, task.rows, before.lens, chosen, context=before.context),
            report=self.reports[-1],
        )

    def capture(self, program: Program, work: Work, task: Task, kv: Sequence[LayerCache]) -> Captured:
        kv = [copy.copy(cache) for cache in kv]
        rests, task = task.rows != task.placed, dataclasses.replace(task, rows=task.placed)  # all, whoever rests
        if ends(work, task):
            k, v = (t[: len(kv[0].k)] for t in program.tail)
            for cache in kv:
                cache.tail = k, v
        used, lengths, remembered = kv[0].used, [cache.length for cache in kv], program.memory.entries()
        work = dataclasses.replace(work, draws=program.draws)
        told: Told | None = None

        def run(pieces: Pieces | None = None) -> Recorded:
            nonlocal told
            program.numbers.fetch(task.scale.index)
            program.memory.remember(remembered)
            for cache, length in zip(kv, lengths, strict=True):
                cache.used, cache.length = used, length
            taken = None if program.pages is None else program.pages.taken[-1:]
            self.capturing = Capturing(pieces, told, taken, at_work=program.at_work(task) if rests else None)
            try:
                step = super(Graphs, self).run_scale(work, task, program.features, kv)
                told = self.capturing.told
            finally:
                self.capturing = None
            assert told is not None
            program.tokens[task.scale.index].copy_(step.tokens)
            if not work.watched:  # nobody asks for them, and they would take the memory of every scale
                nothing = step.logits.new_empty(0)
                step = dataclasses.replace(step, logits=nothing, raw=nothing, hidden=nothing)
            memory, state = program.memory.entries(), program.state()
            chosen = Chosen.of(step.stats.chosen, task.scale.tokens)
            return Recorded(step, chosen, told, memory, [cache.length is None for cache in kv], state)

        program.save()
        if not type(work.policy).__module__.startswith("nextscale.") and program.features.is_cuda:
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
        pieces = Pieces(self.ground.pool)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), pieces.capturing():
            self.ground.make_working_memory(program.working)
            made = run(pieces)
            program.features.copy_(made.step.features)
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

    def places(self, images: int, backbone: Backbone, draws: Draws, forced: Sequence[Tensor]) -> int:
        """A batch is filled up with rows that rest if a warm-up was for one that is not much larger. Graphs of its own
        would be faster by a tenth, or a fifth without a method: complete scales in which nobody rests are cuBLAS's."""
        if not isinstance(draws, PerImageDraws) or forced or not self.rests(backbone):
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

    def told(self, report: dict[str, Tensor]) -> None:
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
            graph = Pieces(self.ground.reserve.id)
            with graph.capturing():
                pictures.copy_(self.fast_decode(tokenizer, place))
        torch.cuda.synchronize()
        self.decoders[tokenizer, tuple(features.shape)] = graph, place, pictures

    def check(self, backbone: Backbone) -> None:
        for scale, captured in self.ran:
            captured.graph.wait()
            guided, raw = captured.made.told.largest
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


def ends(work: Work, task: Task) -> bool:
    """Whether no layer has to keep what it stores: nobody reads it later."""
    return task.scale.index == len(work.schedule) - 1 and not work.policy.passive


def tokens_of(work: Work, scale: Scale) -> int:
    """That a row has at most."""
    return scale.tokens + (0 if scale.index else work.backbone.context)


def why_not(work: Work) -> str:
    """What in this call cannot be captured."""
    if not isinstance(work.draws, PerImageDraws):
        return "random numbers come from the caller's generator"
    if work.forced:
        return "tokens are forced"
    if not work.policy.passive and not work.policy.capturable:
        return "the method waits for the device inside a scale"
    if not work.policy.passive and work.policy.structure is None:
        return "the policy does not say its method"
    if not work.policy.passive and work.backbone.device.type == "cuda" and not takes_packed(work.backbone):
        return "layers in float32, or with heads of this width, have no kernels for tokens that a method keeps"
    return ""
