"""Several methods at once: `NOVA() + DropGuidance(10) + Truncate(1)`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import (
    Activation,
    Decision,
    Group,
    Method,
    Numbers,
    Policy,
    PolicyContext,
    ScaleContext,
    ScalePlan,
)
from nextscale.methods.device_inputs import DeviceInputs
from nextscale.methods.selection import Selection
from nextscale.methods.token_cache import TokenCaches
from nextscale.methods.validation import check_plan

if TYPE_CHECKING:
    from nextscale.models.residual import Stream

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
        selecting = [p for p in policies if not p.is_passthrough]
        if len(selecting) > 1:
            names = " and ".join(m.name for m, p in zip(self.parts, policies, strict=True) if p in selecting)
            raise NextscaleError(f"{names} both select tokens, and a composition has room for one such method")
        return ComposedPolicy(context, policies, selecting[0] if selecting else Policy(context))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "parts": [part.to_dict() for part in self.parts]}


class ComposedPolicy(Policy):
    def __init__(self, context: PolicyContext, policies: list[Policy], selecting: Policy) -> None:
        self.policies, self.selecting = policies, selecting
        super().__init__(context)
        self.method = tuple(p.method for p in policies)
        others = [p for p in policies if p is not selecting]
        host = all(type(p).on_logits is Policy.on_logits for p in others)
        self.capturable = selecting.capturable and host

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

    @property
    def passive(self) -> bool:
        return all(p.passive for p in self.policies)

    @property
    def structure(self) -> Hashable:
        """Of the parts that do something inside a scale: the others decide on the host alone."""
        parts = tuple(p.structure for p in self.policies if not p.passive)
        return None if None in parts else parts[0] if len(parts) == 1 else parts

    @property
    def is_passthrough(self) -> bool:
        return self.selecting.is_passthrough

    @property
    def watches(self) -> bool:
        return any(p.watches for p in self.policies)

    def expected_tokens(self) -> int:
        return min(p.expected_tokens() for p in self.policies)

    def plan_scale(self, scale: Scale) -> ScalePlan:
        plans = [p.plan_scale(scale) for p in self.policies]
        c = self.context
        for policy, plan in zip(self.policies, plans, strict=True):
            check_plan(policy, plan, c.images, c.parts, c.schedule.tokens)
        chosen = plans[self.policies.index(self.selecting)] if self.selecting in self.policies else plans[0]
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

    def restore_residual(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, stream: Stream, ctx: ScaleContext
    ) -> Tensor:
        return self.selecting.restore_residual(layer, group, x, chosen, stream, ctx)

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

    def activation(self, image: int) -> Activation:
        """That of the first part which has one: methods that select tokens come first."""
        ordered = sorted(self.policies, key=lambda p: p is not self.selecting)
        found = [p.activation(image) for p in ordered]
        return next((a for a in found if a.scale is not None), found[0])

    def decision(self, image: int, scale: Scale) -> Decision:
        return self.selecting.decision(image, scale)

    @property
    def rehearsals(self) -> int:
        return max(p.rehearsals for p in self.policies)

    def rehearse(self, number: int) -> None:
        for policy in self.policies:
            policy.rehearse(min(number, policy.rehearsals - 1))

    def conclude(self) -> None:
        for policy in self.policies:
            policy.conclude()

    def release(self) -> None:
        super().release()
        for policy in self.policies:
            policy.release()
