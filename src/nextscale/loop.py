"""The next-scale loop: one for every backbone and every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nextscale.devices import full_precision
from nextscale.draws import Draws
from nextscale.guidance import combine
from nextscale.methods.base import Policy
from nextscale.models.base import Backbone
from nextscale.run import Run
from nextscale.runtime.eager import Eager
from nextscale.sampling import Sampling, sample
from nextscale.schedule import Scale, Schedule
from nextscale.tokenizers.base import ImageTokenizer
from nextscale.trace import Trace


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


Callback = Callable[[ScaleEnd], "bool | Tensor | None"]


@torch.inference_mode()
@full_precision
def generate(
    backbone: Backbone,
    tokenizer: ImageTokenizer,
    condition: Any,
    schedule: Schedule,
    sampling: Sampling,
    draws: Draws,
    policy: Policy,
    images: int,
    trace: Trace,
    forced: Sequence[Tensor] = (),
    on_scale_end: Callback = lambda end: None,
    executor: Eager | None = None,
) -> Run:
    """Feature maps of `images` pictures, in the returned Run."""
    executor = executor or Eager()
    guided = sampling.guided_until > 0
    state = backbone.begin(condition, schedule, guided)
    run = Run(backbone, state, tokenizer.blank(images, schedule), schedule, guided)
    expected = policy.expected_tokens()
    run.reserve(backbone.context + expected if expected else 0)
    inside = [backbone.depth + layer for layer in sampling.guidance_layers if layer < 0]
    for scale in schedule:
        plan = policy.begin_scale(scale)
        rows, state = run.apply(plan, scale)
        if not rows.all:
            continue
        weight = sampling.guidance[scale.index]
        features = run.features_of(rows.which)
        before = rows.spread(tokenizer.inputs(features, scale)) if scale.index else None
        x = backbone.embed(state, before, scale)
        x, stats = executor.run_blocks(backbone, state, x, scale, plan, policy, rows, run.kv, weight, inside)
        x, cell_weight = policy.complete(x, stats)
        raw = backbone.head(state, x)
        on_logits = weight if 0 in sampling.guidance_layers else 1.0
        logits = combine(raw.mul(1 / sampling.temperature[scale.index]), rows.images, rows.guided, on_logits)
        run.require_finite(raw, logits, scale, backbone)
        policy.end_scale(x, raw, logits, stats)
        target = forced[scale.index][list(rows.which)] if scale.index < len(forced) else None
        drawn = sample(logits, scale, sampling, draws, rows.which, tokenizer, target)
        codes = drawn.codes
        if scale.index == len(schedule) - 1:
            codes = backbone.finish(state, x, drawn, tokenizer, rows, weight, draws)
        codes = codes if cell_weight is None else codes * cell_weight[..., None]
        run.store(rows, scale, tokenizer.add(features, codes, scale, schedule), drawn.tokens)
        policy.added(run.features, stats)
        trace.ran(stats, state)
        decode = partial(tokenizer.decode, run.features)
        answer = on_scale_end(ScaleEnd(scale, rows.which, run.features, drawn.tokens, logits, raw, x, decode))
        if isinstance(answer, Tensor):
            run.replace_features(answer)
        elif answer is False:
            run.stop(scale)
            break
    policy.release()
    trace.finished(policy, run.stopped_after)
    return run
