"""The next-scale loop: one for every backbone, every method and every runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.cache.kv import KVCache
from nextscale.engine.callback import after_scale
from nextscale.engine.guidance import guide
from nextscale.engine.model import Model
from nextscale.engine.request import Request
from nextscale.engine.sampling import sample
from nextscale.engine.state import GenerationState
from nextscale.io.devices import full_precision
from nextscale.methods.policy import Policy
from nextscale.methods.validation import check_finalized, check_kv_tokens, check_plan, check_report
from nextscale.runtime.base import CallContext, Executor, ScaleBatch, ScaleOutput

if TYPE_CHECKING:
    from nextscale.runtime.eager import Eager


@torch.inference_mode()
@full_precision
def generate(request: Request, model: Model, policy: Policy, executor: Executor) -> GenerationState:
    """Predict the maps of a request's images, scale by scale."""
    call = CallContext.of(request, model, policy)
    state = executor.open(call, request.read_condition(model.backbone), request.padded_batch, request.guided)
    state.begin(request, check_kv_tokens(policy, request.schedule.tokens), model.backbone)
    for scale in request.schedule:
        plan = check_plan(policy, policy.plan_scale(scale))
        rows = state.apply(plan, scale)
        if rows.all:
            batch = ScaleBatch(scale, plan, rows, state.allocated, state.cond, returns=rows != state.rows)
            output = executor.run_scale(call, batch, state.features, state.kv)
            state.store(batch, output)
            policy.on_report(output.ctx, output.report)
            policy.on_features(state.features, output.ctx)
        request.advance(1)
        if rows.all and request.callback and not after_scale(request.callback, call, state, batch, output):
            break
    policy.release()
    state.trace.finished(policy, state.stopped_after)
    return state


def forward_scale(
    call: CallContext, batch: ScaleBatch, features: Tensor, kv: Sequence[KVCache], executor: Eager
) -> ScaleOutput:
    """Predict one scale from the maps so far. Runtimes run or capture this very function."""
    backbone, tokenizer, policy, scale, rows = call.backbone, call.tokenizer, call.policy, batch.scale, batch.rows
    settings = executor.scale_settings(call, batch)
    before = rows.expand_to_rows(tokenizer.inputs(features, scale)) if scale.index else None
    x = backbone.embed(batch.cond, before, scale)
    x, ctx = executor.run_blocks(call, batch, x, kv, settings)
    x, cell_weight = check_finalized(policy, policy.finalize(x, ctx), x, rows.images)
    raw = executor.head(backbone, batch.cond, x)
    weight = settings.weight if 0 in call.sampling.guidance_layers else 1.0
    logits = guide(raw, rows.images, rows.guided, weight, settings.by)
    executor.require_finite(call, raw, logits, scale)
    policy.on_logits(x, raw, logits, ctx)
    report = check_report(policy, policy.report(ctx), rows.images)
    executor.on_report_ready(report)
    forced = call.forced(scale, rows)
    sampled = sample(logits, scale, call.sampling, settings, call.noise, rows.image_ids, tokenizer, forced)
    if scale.index == len(call.schedule) - 1:
        sampled.codes = backbone.finish(batch.cond, x, sampled, tokenizer, rows, settings.weight, call.noise)
    codes = sampled.codes if cell_weight is None else sampled.codes * cell_weight[..., None]
    features = tokenizer.add(features, codes, scale, call.schedule)
    return ScaleOutput(features, sampled.tokens, logits, raw, x, ctx, report)
