"""A scale as one CUDA graph, so that the GPU never waits for the host to launch its kernels.

A graph reads and writes fixed places. They belong to a `Program`, one for every shape of call: state, KV cache, maps
and random numbers are put there, graphs are replayed, results are copied out.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nextscale.draws import FixedDraws, PerImageDraws
from nextscale.kv import LayerCache
from nextscale.methods.base import Policy, ScalePlan
from nextscale.run import Rows, Run, not_finite
from nextscale.runtime.compiled import Compiled
from nextscale.runtime.eager import Step, Work
from nextscale.schedule import Scale

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Captured:
    graph: Any  # with a `replay`
    step: Step  # its tensors hold the newest replay
    finite: Tensor


class Program:
    """Everything of one shape of call, at fixed places."""

    def __init__(self, work: Work, run: Run) -> None:
        self.state, self.features, self.kv = run.state, run.features, list(run.kv)
        assert isinstance(work.draws, PerImageDraws)
        self.draws = FixedDraws(work.draws)
        self.pool = torch.cuda.graph_pool_handle() if self.features.is_cuda else None
        self.graphs: dict[tuple[int, Rows], Captured] = {}

    def load(self, work: Work, run: Run) -> None:
        """Put what a new call begins with to the fixed places, and let the run use them."""
        assert isinstance(work.draws, PerImageDraws)
        self.draws.source = work.draws
        if run.state is not self.state:
            ours, new = self.state.tensors(), run.state.tensors()
            torch._foreach_copy_(ours, new)
            self.features.zero_()
            # The trace reads lengths long after the next call has overwritten the fixed place.
            run.state = dataclasses.replace(self.state, text_lengths=run.state.text_lengths)
            run.features = self.features
            run.kv = [LayerCache.over(cache.k, cache.v) for cache in self.kv]


class Graphs(Compiled):
    name = "graphs"
    text_slots = 64

    def __init__(self, backend: str = "inductor") -> None:
        super().__init__(backend)
        self.key: Any = None
        self.program: Program | None = None  # of the newest shape of call; its cache is large, so there is but one
        self.reason = ""  # why this call is not captured
        self.unread: list[tuple[Scale, Captured]] = []

    def open(self, work: Work, run: Run) -> None:
        self.unread.clear()
        self.reason = why_not(work)
        if self.reason:
            logger.info("no CUDA graphs: %s", self.reason)
            return
        shapes = tuple((t.shape, t.dtype) for t in run.state.tensors())
        key = (work.backbone, work.schedule, work.sampling, shapes, len(run.features))
        if self.program is None or self.key != key:
            self.program = None  # frees the old one first
            run.reserve(work.backbone.context + work.schedule.tokens)
            self.key, self.program = key, Program(work, run)
        self.program.load(work, run)

    def reset(self) -> None:
        super().reset()
        self.key = self.program = None

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
        if self.reason or program is None or rows.images < len(program.features):
            return super().run_scale(work, scale, plan, rows, state, features, kv)
        if features is not program.features:  # a callback gave others
            program.features.copy_(features)
        work = dataclasses.replace(work, draws=program.draws)
        captured = program.graphs.get((scale.index, rows))
        if captured is None:
            captured = self.capture(program, work, scale, plan, rows, state, kv)
            program.graphs[scale.index, rows] = captured
        else:
            program.draws.refill(scale.index, rows.which)
            for cache in kv:
                cache.used += scale.tokens + captured.step.stats.context
        captured.graph.replay()
        self.unread.append((scale, captured))
        return captured.step

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
        kv, used = list(kv), kv[0].used

        def run() -> tuple[Step, Tensor]:
            for cache in kv:
                cache.used = used
            step = super(Graphs, self).run_scale(work, scale, plan, rows, state, program.features, kv)
            return step, torch.isfinite(step.logits).all()

        graph, (step, finite) = self.record(run, program)
        return Captured(graph, dataclasses.replace(step, features=program.features), finite)

    def record(self, run: Callable[[], tuple[Step, Tensor]], program: Program) -> Any:
        """A graph whose replay is `run` with its maps put to their fixed place, and what it returns."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, measures, loads: nothing of that may be captured
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=program.pool):
            made = run()
            program.features.copy_(made[0].features)
        return graph, made

    def require_finite(self, raw: Tensor, logits: Tensor, scale: Scale, backbone: Any) -> None:
        """Reading a number would make the host wait: `close` does it, once."""
        if self.reason:
            super().require_finite(raw, logits, scale, backbone)

    def close(self, work: Work) -> None:
        if self.unread and not all(torch.stack([c.finite for _, c in self.unread]).tolist()):
            scale, captured = next((s, c) for s, c in self.unread if not c.finite)
            raise not_finite(captured.step.raw, scale, work.backbone)


def why_not(work: Work) -> str:
    """What in this call cannot be captured."""
    if not isinstance(work.draws, PerImageDraws):
        return "random numbers come from the caller's generator"
    if work.forced:
        return "tokens are forced"
    kind = type(work.policy)
    acts = [n for n in ("select", "fill", "complete", "end_scale") if getattr(kind, n) is not getattr(Policy, n)]
    return f"the method's {acts[0]} depends on the picture" if acts else ""
