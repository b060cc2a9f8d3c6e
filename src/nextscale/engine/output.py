"""From a request to its images and their trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nextscale.engine.callback import Callback, ScaleEnd
from nextscale.engine.loop import generate
from nextscale.engine.model import Model
from nextscale.engine.request import Request
from nextscale.engine.trace import Trace
from nextscale.io.devices import Clock, dtype_name, without_autocast
from nextscale.io.images import as_output
from nextscale.io.progress import bar
from nextscale.methods.policy import PlainPolicy
from nextscale.runtime.base import Executor
from nextscale.version import __version__


@dataclass(frozen=True)
class Output:
    images: Any  # list of PIL images, or an array or tensor, as asked by `output_type`
    trace: Trace
    tokens: list[Tensor]  # per scale [B, N] indices or [B, N, d] bits, int32; -1 where a cell added nothing
    seeds: list[int | None]  # None where a generator was given


def run_request(
    request: Request, model: Model, executor: Executor, clock: Clock, progress_bar: bool | None = None
) -> Output:
    """Generate, decode, and tell what it took."""
    request = request.padded_for(executor, model.backbone)
    context = model.policy_context(request.padded_batch, request.schedule, request.sampling)
    policy = PlainPolicy(context) if request.method is None else request.method.begin(context)
    shown: list[int] = []  # scales that the callback has seen
    callback = request.callback and timed(request.callback, executor, clock, shown)
    with bar(model.spec.name, len(request.schedule), progress_bar) as advance:
        timed_request = dataclasses.replace(request, callback=callback, advance=advance)
        state = generate(timed_request, model, policy, executor)
    state.release()
    clock.mark("generated")
    features = state.maps.clone()  # outside inference mode, so that users may write into it
    decoded = None
    if request.output_type != "latent":
        with without_autocast(model.device):
            decoded = executor.decode(model.tokenizer, features)
    # While a GPU decodes:
    tokens = copied([t[: request.images] for t in state.tokens])
    executor.check(model.backbone)
    state.trace.header = header(request, model, executor)
    images: Any = features
    if decoded is not None:
        finite = torch.isfinite(decoded).all()
        images = as_output(decoded, request.output_type)
        model.require_finite(finite)
    clock.mark("done")
    state.trace.seconds = seconds(clock, len(shown), request.callback is not None)
    return Output(images, state.trace, tokens, [image.seed for image in request.traced])


def timed(callback: Callback, executor: Executor, clock: Clock, shown: list[int]) -> Callback:
    """Wrap the user's callback in clock marks: its time is not the transformer's."""

    def after(end: ScaleEnd) -> bool | set[int] | Tensor | None:
        number = len(shown)
        clock.mark(f"callback {number}")
        shown.append(end.scale.index)
        answer = callback(end.copied() if executor.overwrites else end)  # what it sees must outlive the next scale
        clock.mark(f"after callback {number}")
        return answer

    return after


def seconds(clock: Clock, callbacks: int, has_callback: bool) -> dict[str, float]:
    between = clock.between
    aside = sum(between(f"callback {i}", f"after callback {i}") for i in range(callbacks))
    return {
        "text": between("started", "encoded"),
        "transformer": max(between("encoded", "generated") - aside, 0.0),
        **({"callbacks": aside} if has_callback else {}),
        "decode": between("generated", "done"),
        "total": between("started", "done"),
    }


def header(request: Request, model: Model, executor: Executor) -> dict[str, Any]:
    return {
        "nextscale": __version__,
        "model": model.spec.name,
        "dtype": dtype_name(model.backbone.dtype),
        "device": str(model.device),
        "method": {"name": "none", "fields": {}} if request.method is None else request.method.to_dict(),
        "runtime": executor.name,
    }


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy all in one go."""
    flat = torch.cat([t.flatten() for t in tensors]).split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(flat, tensors, strict=True)]
