"""One scale, from the maps so far to those with it: embed, run blocks, head, guide, sample, add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.cache.kv import KVCache
from nextscale.engine.guidance import guide
from nextscale.engine.sampling import NOTHING, sample
from nextscale.methods.validation import check_finalized, check_report
from nextscale.runtime.base import CallContext, ScaleBatch, ScaleOutput

if TYPE_CHECKING:
    from nextscale.runtime.eager import Eager


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
    if forced is not None:
        given = (forced != NOTHING).view(*forced.shape[:2], -1).all(-1).to(x.dtype)
        cell_weight = given if cell_weight is None else given * cell_weight
    if cell_weight is None:
        features = tokenizer.add(features, sampled.codes, scale, call.schedule)
        return ScaleOutput(features, sampled.tokens, logits, raw, x, ctx, report)
    added = tokenizer.add(features, sampled.codes * cell_weight[..., None], scale, call.schedule)
    adds = cell_weight > 0
    features = torch.where(adds.any(1)[:, None, None, None], added, features)  # an empty map may have a bias
    tokens = sampled.tokens.where(adds.view(*adds.shape, *(1,) * (sampled.tokens.ndim - 2)), NOTHING)
    return ScaleOutput(features, tokens, logits, raw, x, ctx, report)
