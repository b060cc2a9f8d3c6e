"""Runs of tiny models as arrays, for the oracles: what entered and left every layer, its queries and keys, logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.oracles.maths import Recording, Scale
from support.pipelines import ask

from nextscale.methods.base import Method
from nextscale.methods.policy import Policy, PolicyContext
from nextscale.models.layers import SelfAttention


def array(x) -> np.ndarray:
    return x.detach().double().cpu().numpy().copy()


@dataclass(frozen=True)
class Watched(Method):
    """A method whose policy is looked at from outside, and otherwise left alone."""

    name = "watched"
    summary = "Another method, recorded."

    inner: Any = None
    into: Any = None

    def start(self, context: PolicyContext) -> Policy:
        if context.decode is not None:
            context = _watch_decoder(context, self.into)
        policy = self.inner.start(context)
        _watch(policy, self.into)
        return policy

    def to_dict(self) -> dict[str, Any]:
        return self.inner.to_dict()


def _watch_decoder(context: PolicyContext, recording: Recording) -> PolicyContext:
    inner = context.decode

    def decode(features):
        images = inner(features)
        recording.previews.append((array(features), array(images)))
        return images

    return dataclasses.replace(context, decode=decode)


def _watch(policy: Policy, recording: Recording) -> None:
    begin, select, restore, finalize = policy.plan_scale, policy.select, policy.restore, policy.finalize

    def plan_scale(scale):
        recording.scales.append(Scale(scale.grid))
        return begin(scale)._replace(needs_hidden=True)

    def watched_select(layer, group, x, ctx):
        recording.scales[-1].inputs[layer, group] = array(x)
        return select(layer, group, x, ctx)

    def watched_fill(layer, group, x, chosen, y, ctx):
        filled = restore(layer, group, x, chosen, y, ctx)
        recording.scales[-1].outputs[layer, group] = array(filled)
        return filled

    def watched_complete(x, ctx):
        state, weight = finalize(x, ctx)
        recording.scales[-1].completed = array(state)
        recording.scales[-1].weight = None if weight is None else array(weight)
        return state, weight

    policy.plan_scale, policy.select = plan_scale, watched_select  # type: ignore[method-assign]
    policy.restore, policy.finalize = watched_fill, watched_complete  # type: ignore[method-assign]


def record(pipe, method: Method, images: int = 2, **options):
    """A run, and the arrays of it."""
    backbone = pipe.backbone
    layers = {id(block.attn): layer for layer, block in enumerate(backbone.blocks)}
    head = {name: array(getattr(backbone.head_linear, name)) for name in ("weight", "bias")}
    norm = getattr(backbone, "head_norm", None)
    head.update(eps=backbone.config.eps, rms=norm is not None, gain=1.0 if norm is None else array(norm.weight))
    recording = Recording(
        [],
        backbone.depth,
        images,
        bool(backbone.token_shape),
        backbone.blocks[0].attn.softmax_scale,
        head,
        backbone.context,
    )
    split, prepare = SelfAttention.split, type(backbone).prepare

    def watched_split(self, qkv, positions):
        q, k, v = split(self, qkv, positions)
        scale = recording.scales[-1]
        scale.queries[layers[id(self)]], scale.keys[layers[id(self)]] = array(q), array(k)
        return q, k, v

    def watched_prepare(*args):
        state = prepare(*args)
        head["scale"], head["shift"] = (array(t) for t in state.head_modulation.unbind(2))
        return state

    def look(end) -> None:
        scale = recording.scales[-1]
        scale.raw, scale.guided, scale.features = array(end.raw_logits), array(end.logits), array(end.features)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfAttention, "split", watched_split)
        patch.setattr(type(backbone), "prepare", watched_prepare)
        out = ask(pipe, images, method=Watched(method, recording), callback_on_scale_end=look, **options)
    return out, recording


def kept(out, image: int, t: int, layer: int, part: str = "self", row: int = 0) -> np.ndarray:
    """What the trace says, [N]; scales and layers count from 0."""
    return out.trace.kept(image, t + 1, layer + 1, part, row).flatten()
