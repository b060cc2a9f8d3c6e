"""The next-scale loop: one for every backbone, every method and every runtime."""

from __future__ import annotations

import torch

from nextscale.engine.callback import after_scale
from nextscale.engine.model import Model
from nextscale.engine.request import Request
from nextscale.engine.state import GenerationState
from nextscale.io.devices import full_precision
from nextscale.methods.policy import Policy
from nextscale.methods.validation import check_kv_tokens, check_plan
from nextscale.runtime.base import CallContext, Executor, ScaleBatch


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
            # Embed, run blocks, head, guide, sample, add: `forward_scale`, which runtimes may capture.
            output = executor.run_scale(call, batch, state.features, state.kv)
            state.store(batch, output)
            policy.on_report(output.ctx, output.report)
            policy.on_features(state.features, output.ctx)
        request.advance(1)
        callback = request.callback if rows.all else None
        if callback and not after_scale(callback, call, executor, state, batch, output):
            break
    policy.release()
    state.trace.finished(policy, state.stopped_after)
    return state
