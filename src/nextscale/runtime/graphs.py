"""A scale as one CUDA graph, so that the GPU never waits for the host to launch its kernels.

A graph reads and writes fixed places. They belong to a `Program`, one for every shape of call and method: state, KV
cache, maps, random numbers and what the method remembers are put there, graphs are replayed, results are copied out.

A method may keep another number of tokens in every layer and picture. A graph has room for some in each layer, its
`slots`; what is left of it is padding. How many are needed is guessed before, and a graph is taken that has enough room
and not much more; if a layer wanted more, the scale is run again with another.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nextscale.devices import wait_for
from nextscale.draws import FixedDraws, PerImageDraws
from nextscale.kv import LayerCache
from nextscale.methods.base import Policy, ScalePlan, Stats
from nextscale.methods.residual import Places, TokenCaches
from nextscale.methods.selection import Selection
from nextscale.run import Rows, Run, not_finite
from nextscale.runtime.decoder import FastDecode
from nextscale.runtime.eager import Eager, Step, Work
from nextscale.schedule import Scale
from nextscale.tokenizers.base import ImageTokenizer

logger = logging.getLogger(__name__)

CUTS = (
    1,
    5,
)  # layers behind which a graph is cut: the first pieces are short, and hide how long the rest takes to launch
SHARE = 0.2  # of a plain run's tokens: room in the KV cache to begin with, if a method leaves tokens out
SHORT = 4096  # numbers of a report
WASTE = 1.2  # times the slots that are needed: rather than capturing anew, which runs the scale twice and more


Inputs = tuple[Tensor | None, ...]  # a condition, as its backbone has read it
Used = tuple[int, bool]  # slots of a layer's cache that the host knows to be used, and whether its rows differ


@dataclass(frozen=True)
class Recorded:
    """What a scale leaves behind. Graphs share memory: `step` and `chosen` hold until another one is replayed."""

    step: Step
    chosen: Chosen
    told: Told
    memory: dict[Hashable, Any]  # of the policy
    kv: list[Used]


@dataclass(frozen=True)
class Captured:
    graph: Any  # with a `replay`
    made: Recorded


@dataclass(frozen=True)
class Chosen:
    """The selections of all layers, each stored once."""

    index: Tensor | None  # [R, K of all selections]
    count: Tensor | None  # [selections, R]
    sizes: list[int]  # K of each
    which: list[dict[str, int | None]]  # per layer and part; None = all tokens

    @classmethod
    def of(cls, chosen: list[dict[str, Selection | None]]) -> Chosen:
        distinct = {id(c): c for parts in chosen for c in parts.values() if c is not None}
        number = {key: n for n, key in enumerate(distinct)}
        which = [{p: None if c is None else number[id(c)] for p, c in parts.items()} for parts in chosen]
        if not distinct:
            return cls(None, None, [], which)
        index = torch.cat([c.index for c in distinct.values()], dim=1)
        count = torch.stack([c.count for c in distinct.values()])
        return cls(index, count, [c.index.shape[1] for c in distinct.values()], which)

    def copied(self) -> list[dict[str, Selection | None]]:
        """For the trace, which must outlive the next replay."""
        if self.index is None or self.count is None:
            return [dict.fromkeys(parts) for parts in self.which]
        parts = self.index.clone().split(self.sizes, dim=1)
        made = [Selection(i, c) for i, c in zip(parts, self.count.clone(), strict=True)]
        return [{p: None if n is None else made[n] for p, n in parts.items()} for parts in self.which]


class Told:
    """What a scale reports. Short parts end in memory that the host reads without asking the device once more."""

    def __init__(self, report: dict[str, Tensor]) -> None:
        self.long = {name: told for name, told in report.items() if told.numel() > SHORT}
        self.shapes = {name: told.shape for name, told in report.items() if name not in self.long}
        numbers = sum(shape.numel() for shape in self.shapes.values())
        pinned = any(told.is_cuda for told in report.values())
        self.host = torch.empty(numbers, dtype=torch.float64, pin_memory=pinned)

    def write(self, report: dict[str, Tensor]) -> None:
        self.long = {name: report[name] for name in self.long}
        if self.shapes:
            numbers = torch.cat([report[name].double().flatten() for name in self.shapes])
            self.host.copy_(numbers, non_blocking=True)

    def read(self) -> dict[str, Tensor]:
        """After the device has written."""
        parts = self.host.clone().split([shape.numel() for shape in self.shapes.values()])
        short = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return short | {name: told.clone() for name, told in self.long.items()}


class Pieces:
    """CUDA graphs that follow each other. While the device runs one, the host hands over the next."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.graphs: list[Any] = []

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self.pool)

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def replay(self) -> None:
        for graph in self.graphs:
            graph.replay()


class Program:
    """Everything of one shape of call, at fixed places."""

    def __init__(self, work: Work, inputs: Inputs, run: Run) -> None:
        assert isinstance(work.draws, PerImageDraws)
        self.inputs: Inputs = tuple(None if t is None else t.clone() for t in inputs)
        self.features = run.features
        self.kv = [(cache.k, cache.v) for cache in run.kv]
        self.used = [0] * len(self.kv)  # entries of each layer at most, in the call at work
        rows = len(run.kv[0].k)
        self.lengths = torch.zeros(len(self.kv), rows, dtype=torch.long, device=self.features.device)
        self.before = self.features.clone(), self.lengths.clone()
        # The largest logit of each scale, after and before guidance: NaN or infinite if any is.
        self.largest = torch.zeros(len(work.schedule), 2, device=self.features.device)
        self.all_tokens = torch.cat([t.flatten() for t in run.tokens])
        parts = self.all_tokens.split([t.numel() for t in run.tokens])
        self.tokens = [part.view(t.shape) for part, t in zip(parts, run.tokens, strict=True)]
        self.draws = FixedDraws(work.draws)
        self.memory = TokenCaches(Places(work.schedule))
        self.numbers: dict[str, Tensor] = {}
        self.experience: dict[str, Any] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.features.is_cuda else None
        self.beginning: tuple[Any, Any] = (None, None)  # a graph that makes the state, and the state
        self.graphs: dict[Hashable, dict[tuple[int, ...], Captured]] = {}  # by their slots
        self.decoding: tuple[Any, Tensor, Tensor] | None = None  # a graph, the maps it reads, the pictures it makes

    def load(self, work: Work, inputs: Inputs, images: int, guided: bool) -> Run:
        """Put what a call begins with to the fixed places, and let it work there."""
        assert isinstance(work.draws, PerImageDraws)
        for place, given in zip(self.inputs, inputs, strict=True):
            if place is not None and given is not None:
                place.copy_(given)
        graph, state = self.beginning
        graph.replay()
        self.draws.begin(work.draws)
        self.features.zero_()
        self.used = [0] * len(self.kv)
        self.memory.remember({})
        work.policy.memory, work.policy.numbers = self.memory, self.numbers
        work.policy.experience = self.experience
        kv = [LayerCache.over(k, v, length) for (k, v), length in zip(self.kv, self.lengths, strict=True)]
        self.all_tokens.fill_(-1)
        return Run(work.backbone, state, self.features, work.schedule, guided, kv, self.tokens)

    def make_room(self, tokens: Sequence[int], kv: Sequence[LayerCache]) -> bool:
        """For so many tokens more in the cache of each layer. Whether it grew: then no graph knows its places."""
        grown = False
        for n, cache in enumerate(kv):
            missing = self.used[n] + tokens[n] - cache.k.shape[2]
            if missing <= 0:
                continue
            more = (0, 0, 0, max(missing, cache.k.shape[2] // 2))
            if cache.k.data_ptr() != self.kv[n][0].data_ptr():  # some rows have left, and the others moved together
                cache.k, cache.v = (torch.nn.functional.pad(t, more) for t in (cache.k, cache.v))
                continue
            k, v = (torch.nn.functional.pad(t, more) for t in self.kv[n])
            self.kv[n], rows = (k, v), len(cache.k)
            cache.k, cache.v = k[:rows], v[:rows]
            grown = True
        if grown:
            wait_for(self.features.device)  # a graph may still be at work
            self.graphs.clear()
        return grown

    def save(self) -> None:
        for place, now in zip(self.before, (self.features, self.lengths), strict=True):
            place.copy_(now)

    def go_back(self) -> None:
        """To where `save` was called: as if the scale had not been run."""
        for place, now in zip(self.before, (self.features, self.lengths), strict=True):
            now.copy_(place)


class Graphs(Eager):
    name = "graphs"
    overwrites = True
    text_slots = 64

    def __init__(self) -> None:
        self.fast_decode = FastDecode()
        self.key: Hashable = None
        self.program: Program | None = None  # of the newest shape of call; its cache is large, so there is but one
        self.reason = ""  # why this call is not captured
        self.apart = False  # pictures of this call have run different scales
        self.unread: list[Scale] = []  # captured scales of this call whose logits nobody has checked
        self.scales = self.again = 0  # reduced scales that were run, and those that needed more room
        self.captured = 0  # scales
        self.pieces: Pieces | None = None  # of the graph that is being captured

    def open(self, work: Work, inputs: Inputs, images: int, guided: bool) -> Run:
        self.unread.clear()
        self.apart, self.reason = False, why_not(work)
        if self.reason:
            logger.info("no CUDA graphs: %s", self.reason)
            return super().open(work, inputs, images, guided)
        shapes = tuple(None if t is None else (t.shape, t.dtype) for t in inputs)
        method = None if passive(work.policy) else work.policy.method
        key = (work.backbone, work.schedule, work.sampling, shapes, images, guided, method)
        if self.program is None or self.key != key:
            self.program = None  # frees the old one first
            run = super().open(work, inputs, images, guided)
            share = 1.0 if passive(work.policy) else SHARE
            run.reserve(work.backbone.context + math.ceil(share * work.schedule.tokens))
            self.key, self.program = key, Program(work, inputs, run)
            self.program.beginning = self.record_state(work, self.program)
        return self.program.load(work, inputs, images, guided)

    def record_state(self, work: Work, program: Program) -> tuple[Any, Any]:
        """A graph that makes the state from its inputs. It has been made before, so nothing is left to compile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=program.pool):
            state = work.backbone.prepare(program.inputs, work.schedule)
        return graph, state

    def run_scale(
        self,
        work: Work,
        scale: Scale,
        plan: ScalePlan,
        rows: Rows,
        state: Any,
        features: Tensor,
        kv: Sequence[LayerCache],
    ) -> Step:
        program = self.program
        all_tokens = (scale.tokens + (0 if scale.index else work.backbone.context),) * len(kv)
        some = program is not None and rows.images < len(program.features)
        # What a method remembers of pictures that rest lies anywhere: from then on nothing can be captured.
        self.apart |= some and not passive(work.policy)
        if self.reason or program is None or some or self.apart:
            self.slots = ()
            if program is not None and not self.reason:  # some pictures rest: their rows of the cache are kept
                program.make_room(all_tokens, kv)
                program.used = list(map(operator.add, program.used, all_tokens))
            return super().run_scale(work, scale, plan, rows, state, features, kv)
        if features is not program.features:
            program.features.copy_(features)
        everyone = range(len(features))
        program.draws.refill(scale.index, everyone)
        work = dataclasses.replace(work, draws=program.draws)
        remembered = program.memory.entries()
        key = (scale.index, rows, plan.variant, plan.needs, tuple(used_of(kv)))
        need = plan.slots
        self.scales += bool(need)
        while True:
            graphs = program.graphs.setdefault(key, {})
            self.slots = enough_room(need, graphs, scale.tokens)
            room = self.slots or all_tokens
            if program.make_room(room, kv):
                continue
            captured = graphs.get(self.slots)
            if captured is None:
                program.save()
                captured = graphs[self.slots] = self.capture(program, work, scale, plan, rows, state, kv)
            made = captured.made
            captured.graph.replay()
            # While the device is at work: the numbers of the next scale, and what has to outlive it.
            program.draws.refill(scale.index + 1, everyone)
            stats = Stats(scale, rows, made.step.stats.lens, made.chosen.copied(), context=made.step.stats.context)
            maps = program.features.clone() if work.watched else program.features
            if made.told.shapes:
                self.wait(program)
            report = made.told.read()
            wanted = [int(n) for n in report["wanted"].tolist()] if need else []
            if all(map(operator.le, wanted, self.slots)):
                break
            self.again += 1
            program.go_back()
            program.memory.remember(remembered)
            need = tuple(map(max, wanted, need))
        use(kv, made.kv)
        program.used = list(map(operator.add, program.used, wanted or room))
        program.memory.remember(made.memory)
        self.unread.append(scale)
        tokens = program.tokens[scale.index]
        return dataclasses.replace(made.step, features=maps, tokens=tokens, stats=stats, report=report)

    def wait(self, program: Program) -> None:
        """Until the device has written what it reports."""
        torch.cuda.current_stream(program.features.device).synchronize()

    def capture(
        self,
        program: Program,
        work: Work,
        scale: Scale,
        plan: ScalePlan,
        rows: Rows,
        state: Any,
        kv: Sequence[LayerCache],
    ) -> Captured:
        kv = [copy.copy(cache) for cache in kv]
        before, remembered = used_of(kv), program.memory.entries()
        told: Told | None = None  # its memory has to be there before anything is captured

        def run() -> Recorded:
            nonlocal told
            if plan.slots:
                program.save()  # there may be too little room
            program.memory.remember(remembered)
            use(kv, before)
            step = super(Graphs, self).run_scale(work, scale, plan, rows, state, program.features, kv)
            largest = torch.stack([logits.abs().amax() for logits in (step.logits, step.raw)])
            program.largest[scale.index].copy_(largest)
            program.tokens[scale.index].copy_(step.tokens)
            told = told or Told(step.report)
            told.write(step.report)
            return Recorded(step, Chosen.of(step.stats.chosen), told, program.memory.entries(), used_of(kv))

        self.captured += 1
        graph, made = self.record(run, program)
        program.memory.remember(remembered)  # nothing has been run yet
        return Captured(graph, made)

    def record(self, run: Callable[[], Recorded], program: Program) -> tuple[Any, Recorded]:
        """A graph whose replay is `run` with its maps put to their fixed place, and what `run` returns."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, measures, loads: nothing of that may be captured
            run()
        torch.cuda.current_stream().wait_stream(side)
        program.go_back()
        torch.cuda.synchronize()
        self.pieces = pieces = Pieces(program.pool)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pieces.begin()
            try:
                made = run()
                program.features.copy_(made.step.features)
            finally:
                pieces.end()
                self.pieces = None
        torch.cuda.current_stream().wait_stream(side)
        return pieces, made

    def layer_done(self, layer: int) -> None:
        if self.pieces is not None and layer in CUTS:
            self.pieces.end()
            self.pieces.begin()

    def require_finite(self, raw: Tensor, logits: Tensor, scale: Scale, backbone: Any) -> None:
        """Reading a number would make the host wait: `close` does it, once."""
        if self.reason or self.apart:
            super().require_finite(raw, logits, scale, backbone)

    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        program = self.program
        if program is None or features.shape != program.features.shape or not features.is_cuda:
            return self.fast_decode(tokenizer, features)
        if program.decoding is None:
            place = features.clone()
            pictures = self.fast_decode(tokenizer, place)  # measures, loads
            graph = torch.cuda.CUDAGraph()
            # All scales have been run, so the memory of their graphs can be used again.
            with torch.inference_mode(), torch.cuda.graph(graph, pool=program.pool):
                pictures = self.fast_decode(tokenizer, place)
            program.decoding = graph, place, pictures
        graph, place, pictures = program.decoding
        place.copy_(features)
        graph.replay()
        return pictures.clone()

    def close(self, work: Work, run: Run) -> None:
        if not self.unread or self.program is None:
            return
        run.features = run.features.clone()  # else the next call would write into them
        largest = self.program.largest.tolist()
        for scale in self.unread:
            guided, raw = largest[scale.index]
            if not math.isfinite(guided):
                raise not_finite(math.isfinite(raw), scale, work.backbone)


def enough_room(need: tuple[int, ...], have: Iterable[tuple[int, ...]], tokens: int) -> tuple[int, ...]:
    """Slots of every layer: those of a graph that has enough of them and not many more, or else rounded up."""
    rounded = tuple(min(round_up(n), tokens) for n in need)
    fitting = [slots for slots in have if all(map(operator.le, need, slots)) and sum(slots) <= WASTE * sum(rounded)]
    return min(fitting, key=sum, default=rounded)


def round_up(n: int) -> int:
    """By an eighth at most, or to a multiple of 16."""
    step = max(2 ** (n.bit_length() - 4), 16) if n > 16 else 16
    return -(-n // step) * step


def used_of(kv: Sequence[LayerCache]) -> list[Used]:
    return [(0, True) if cache.length is not None else (cache.used, False) for cache in kv]


def use(kv: Sequence[LayerCache], used: Sequence[Used]) -> None:
    """What the host knows of a cache whose scale was run by a graph. Of rows that differ, only the device does."""
    for cache, (slots, ragged) in zip(kv, used, strict=True):
        cache.used, cache.length = slots, cache.length_place if ragged else None


def passive(policy: Policy) -> bool:
    """Whether a policy decides on the host alone, so that its scales are those of the plain run."""
    kind = type(policy)
    return all(getattr(kind, n) is getattr(Policy, n) for n in ("select", "fill", "complete", "end_scale", "report"))


def why_not(work: Work) -> str:
    """What in this call cannot be captured."""
    if not isinstance(work.draws, PerImageDraws):
        return "random numbers come from the caller's generator"
    if work.forced:
        return "tokens are forced"
    if not passive(work.policy) and not work.policy.capturable:
        return "the method waits for the device inside a scale"
    if not passive(work.policy) and work.policy.method is None:
        return "the policy does not say its method"
    return ""
