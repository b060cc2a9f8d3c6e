"""Several methods at once: `NOVA() + DropGuidance(10) + Truncate(1)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.device_inputs import DeviceInputs
from nextscale.methods.policy import (
    Capabilities,
    Explanation,
    Group,
    Numbers,
    PlainPolicy,
    Policy,
    PolicyContext,
    ScaleContext,
    ScalePlan,
)
from nextscale.methods.selection import Selection
from nextscale.methods.token_cache import TokenCaches
from nextscale.methods.validation import check_plan

_STRENGTH = {"run": 0, "skip": 1, "stop": 2}


@dataclass(frozen=True)
class Compose(Method):
    """Elementwise: stop before skip before run, guided only if all guide. One part at most selects tokens."""

    name = "compose"
    summary = "Applies several methods at once."

    parts: tuple[Method, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        flat = tuple(p for part in self.parts for p in (part.parts if isinstance(part, Compose) else (part,)))
        object.__setattr__(self, "parts", flat)
        if not flat:
            raise NextscaleError("compose needs at least one method")

    def start(self, context: PolicyContext) -> Policy:
        policies = [part.begin(context) for part in self.parts]
        selecting = [p.name for p in policies if p.capabilities.selects]
        if len(selecting) > 1:
            names = " and ".join(selecting)
            raise NextscaleError(f"{names} both select tokens, and a composition has room for one such method")
        return ComposedPolicy(context, policies)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "parts": [part.to_dict() for part in self.parts]}


def merge(all_of: Sequence[Capabilities], selecting: Capabilities) -> Capabilities:
    """Declare for a composition what its parts declare; one of them selects tokens."""
    known = [c.kv_tokens for c in all_of if c.kv_tokens is not None]
    others = [c for c in all_of if c is not selecting]
    in_scale = [c.graph_key for c in all_of if not c.host_only]  # the others decide on the host alone
    captured = all(c.host_only for c in others) and None not in in_scale
    return Capabilities(
        selects=selecting.selects,
        acts_in_scale=any(c.acts_in_scale for c in all_of),
        reads_features=any(c.reads_features for c in all_of),
        keeps_input=selecting.keeps_input,
        fused_restore=selecting.fused_restore,
        kv_tokens=min(known) if known else None,
        graph_key=in_scale[0] if in_scale and captured else None,
        warmup_calls=max(c.warmup_calls for c in all_of),
    )


class ComposedPolicy(Policy):
    def __init__(self, context: PolicyContext, policies: Sequence[Policy]) -> None:
        self.policies = policies
        self.selecting = next((p for p in policies if p.capabilities.selects), None) or PlainPolicy(context)
        super().__init__(context)
        self.capabilities = merge([p.capabilities for p in policies], self.selecting.capabilities)

    @property
    def memory(self) -> TokenCaches:
        return self.selecting.memory

    @memory.setter
    def memory(self, memory: TokenCaches) -> None:
        self.selecting.memory = memory

    @property
    def uploads(self) -> DeviceInputs:
        return self.selecting.uploads

    @uploads.setter
    def uploads(self, uploads: DeviceInputs) -> None:
        self.selecting.uploads = uploads

    def plan_scale(self, scale: Scale) -> ScalePlan:
        plans = [check_plan(p, p.plan_scale(scale)) for p in self.policies]
        chosen = next((plan for p, plan in zip(self.policies, plans, strict=True) if p is self.selecting), plans[0])
        return ScalePlan(
            actions=tuple(
                max(each, key=_STRENGTH.__getitem__) for each in zip(*(p.actions for p in plans), strict=True)
            ),
            guided=tuple(map(all, zip(*(p.guided for p in plans), strict=True))),
            capacity=min(p.capacity for p in plans),
            groups=chosen.groups,
            needs=frozenset().union(*(p.needs for p in plans)),
            needs_hidden=chosen.needs_hidden,
            variant=chosen.variant,
        )

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        return self.selecting.select(layer, group, x, ctx)

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        return self.selecting.restore(layer, group, x, chosen, y, ctx)

    def finalize(self, x: Tensor, ctx: ScaleContext) -> tuple[Tensor, Tensor | None]:
        return self.selecting.finalize(x, ctx)

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        for policy in self.policies:
            policy.on_logits(x, raw, logits, ctx)

    def report(self, ctx: ScaleContext) -> dict[str, Tensor]:
        return self.selecting.report(ctx)

    def on_report(self, ctx: ScaleContext, report: Mapping[str, Numbers]) -> None:
        self.selecting.on_report(ctx, report)

    def on_features(self, features: Tensor, ctx: ScaleContext) -> None:
        for policy in self.policies:
            policy.on_features(features, ctx)

    def explain(self, image: int) -> Explanation:
        """Take the activation of the first part that has one: the one that selects tokens comes first."""
        ordered = sorted(self.policies, key=lambda p: p is not self.selecting)
        found = [p.explain(image) for p in ordered]
        activation = next((e.activation for e in found if e.activation.scale is not None), found[0].activation)
        return dataclasses.replace(self.selecting.explain(image), activation=activation)

    def release(self) -> None:
        super().release()
        for policy in self.policies:
            policy.release()
