"""The next-scale loop: one for every backbone and every method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nextscale.engine.rng import NoiseSource
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Scale, Schedule
from nextscale.engine.state import GenerationState
from nextscale.engine.trace import Trace
from nextscale.io.arguments import is_flag
from nextscale.io.devices import full_precision
from nextscale.methods.base import Policy
from nextscale.methods.validation import check_expected, check_plan
from nextscale.models.base import Backbone
from nextscale.runtime.eager import CallContext, Eager, ScaleBatch
from nextscale.tokenizers.base import ImageTokenizer


@dataclass(frozen=True)
class ScaleEnd:
    """What a callback sees after a scale.

    It may return False to end the run, or a tensor like `features` to go on with instead.
    """

    scale: Scale
    images: tuple[int, ...]  # the images that ran, one per row of the tensors below
    features: Tensor  # the accumulated maps of ALL images, [B, d, H, W]
    tokens: Tensor  # [b, N] indices or [b, N, d] bits
    logits: Tensor  # guided, before top-k and top-p
    raw_logits: Tensor  # of every row, before temperature and guidance
    hidden: Tensor  # output of the last block, [R, N, C]
    decode: Callable[[], Tensor]  # the picture so far, [B, 3, H, W] in [-1, 1]

    def copied(self) -> ScaleEnd:
        """One that may be kept, where the next call overwrites these tensors."""
        tokens, logits, raw = self.tokens.clone(), self.logits.clone(), self.raw_logits.clone()
        return dataclasses.replace(self, tokens=tokens, logits=logits, raw_logits=raw, hidden=self.hidden.clone())


def filled_up(inputs: tuple[Tensor | None, ...], images: int, places: int) -> tuple[Tensor | None, ...]:
    """What was read of a condition, one entry per row, with the last image's once more for every place behind it."""
    if places == images:
        return inputs
    row = [min(place, images - 1) for place in range(places)]

    def restore(rows: Tensor) -> Tensor:
        index = [first + r for first in range(0, len(rows), images) for r in row]
        return rows[torch.tensor(index, device=rows.device)]

    return tuple(None if t is None else restore(t) for t in inputs)


Callback = Callable[[ScaleEnd], "bool | Tensor | None"]


@torch.inference_mode()
@full_precision
def generate(
    backbone: Backbone,
    tokenizer: ImageTokenizer,
    condition: Any,
    schedule: Schedule,
    sampling: Sampling,
    draws: NoiseSource,
    policy: Policy,
    images: int,
    trace: Trace,
    forced: Sequence[Tensor] = (),
    on_scale_end: Callback | None = None,
    executor: Eager | None = None,
    advance: Callable[[int], None] = lambda steps: None,
    places: int | None = None,
) -> GenerationState:
    """Feature maps of `images` pictures, in the returned Run; `advance` is told of every scale. A batch may have more
    `places` than that, all of which the policy and the draws know; the others never run."""
    executor, places = executor or Eager(), places or images
    guided = sampling.guided_until > 0
    watched = on_scale_end is not None or policy.watches
    call = CallContext(backbone, tokenizer, schedule, sampling, policy, draws, forced, watched)
    run = executor.open(call, filled_up(backbone.read(condition, guided), images, places), places, guided)
    run.admit(images)
    expected = policy.expected_tokens()
    check_expected(policy, expected, schedule.tokens)
    run.reserve(backbone.context + expected if expected else 0)
    for scale in schedule:
        plan = policy.plan_scale(scale)
        check_plan(policy, plan, places, backbone.parts, schedule.tokens)
        rows = run.apply(plan, scale)
        if not rows.all:
            advance(1)
            continue
        batch = ScaleBatch(scale, plan, rows, run.placed, run.cond, returns=rows != run.rows)
        output = executor.run_scale(call, batch, run.features, run.kv)
        run.store(rows, scale, output.features, output.tokens)
        policy.on_report(output.ctx, output.report)
        policy.on_features(run.features, output.ctx)
        trace.ran(output.ctx, run.cond, batch.places)
        advance(1)
        if on_scale_end is None:
            continue
        tokens = output.tokens if len(output.tokens) == rows.images else output.tokens[list(rows.which)]
        decode = partial(tokenizer.decode, run.maps)
        end = ScaleEnd(scale, rows.which, run.maps, tokens, output.logits, output.raw, output.hidden, decode)
        answer = on_scale_end(end)
        if is_flag(answer):
            if not answer:
                run.stop(scale)
                break
        elif answer is not None:
            run.replace_features(answer)
    policy.release()
    trace.finished(policy, run.stopped_after)
    return run
