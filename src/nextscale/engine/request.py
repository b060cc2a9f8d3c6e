"""One call of a pipeline: from what was asked for to pictures and their trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nextscale.engine.loop import Callback, ScaleEnd, generate
from nextscale.engine.prompts import Prompts
from nextscale.engine.rng import NoiseSource, PerImageNoise
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Schedule
from nextscale.engine.trace import Costs, Trace
from nextscale.io.devices import Clock, name_of
from nextscale.io.images import as_output
from nextscale.io.progress import bar
from nextscale.methods.base import Method, Policy
from nextscale.runtime.eager import Eager
from nextscale.version import __version__

if TYPE_CHECKING:
    from nextscale.pipeline import Pipeline


@dataclass(frozen=True)
class Output:
    images: Any  # list of PIL images, or an array or tensor, as asked by `output_type`
    trace: Trace
    tokens: list[Tensor]  # per scale [B, N] indices or [B, N, d] bits, int32; -1 where an image did not run
    seeds: list[int | None]  # None where a generator was given


@dataclass(frozen=True)
class Request:
    """Arguments that have been read and checked."""

    pipe: Pipeline
    prompts: Prompts
    schedule: Schedule
    sampling: Sampling
    draws: NoiseSource
    seeds: list[int | None]
    forced: Sequence[Tensor]
    method: Method | None
    callback: Callback | None
    output_type: str
    condition: Any
    clock: Clock  # its call has started, and the text is encoded

    def make(self, executor: Eager) -> Output:
        pipe, images, draws = self.pipe, self.prompts.images, self.draws
        places = executor.places(images, pipe.backbone, draws, self.forced)
        if isinstance(draws, PerImageNoise):
            draws = draws.filled_up(places)
        context = pipe.context(places, self.schedule, self.sampling)
        policy = Policy(context) if self.method is None else self.method.begin(context)
        traced = self.prompts.traced(self.seeds)
        trace = Trace(Costs.of(pipe.backbone), self.schedule, traced, self.sampling.guided_until)
        called: list[int] = []
        with bar(pipe.spec.name, len(self.schedule), pipe.progress_bar) as advance:
            run = generate(
                pipe.backbone,
                pipe.tokenizer,
                self.condition,
                self.schedule,
                self.sampling,
                draws,
                policy,
                images,
                trace,
                self.forced,
                self._after_scale(executor, called),
                executor,
                advance,
                places,
            )
        run.release()
        self.clock.mark("generated")
        features = run.maps.clone()  # outside inference mode, so that users may write into it
        pictures = None if self.output_type == "latent" else pipe.start_decoding(features, executor)
        # While a GPU decodes:
        policy.conclude()
        tokens = copied([t[:images] for t in run.tokens])
        executor.check(pipe.backbone)
        trace.header = self._header(executor)
        made: Any = features
        if pictures is not None:
            finite = torch.isfinite(pictures).all()
            made = as_output(pictures, self.output_type)
            pipe.require_finite(finite)
        self.clock.mark("done")
        between = self.clock.between
        aside = sum(between(f"callback {i}", f"after callback {i}") for i in range(len(called)))
        trace.seconds = {
            "text": between("started", "encoded"),
            "transformer": max(between("encoded", "generated") - aside, 0.0),
            **({} if self.callback is None else {"callbacks": aside}),
            "decode": between("generated", "done"),
            "total": between("started", "done"),
        }
        return Output(made, trace, tokens, self.seeds)

    def _after_scale(self, executor: Eager, called: list[int]) -> Callback | None:
        """The user's callback, with a clock: its time is not the transformer's. `called` gets the scales it saw."""
        callback = self.callback
        if callback is None:
            return None

        def after(end: ScaleEnd) -> bool | Tensor | None:
            number = len(called)
            self.clock.mark(f"callback {number}")
            called.append(end.scale.index)
            answer = callback(end.copied() if executor.overwrites else end)  # what it sees must outlive the next scale
            self.clock.mark(f"after callback {number}")
            return answer

        return after

    def _header(self, executor: Eager) -> dict[str, Any]:
        """Of the trace."""
        pipe, method = self.pipe, self.method
        return {
            "nextscale": __version__,
            "model": pipe.spec.name,
            "dtype": name_of(pipe.dtype),
            "device": str(pipe.device),
            "method": {"name": "none", "fields": {}} if method is None else method.to_dict(),
            "runtime": executor.name,
        }


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, made in one go."""
    parts = torch.cat([t.flatten() for t in tensors]).split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
