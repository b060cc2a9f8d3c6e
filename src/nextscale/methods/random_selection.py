"""A control: as many tokens as another method keeps, but any."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.methods.base import Method
from nextscale.methods.compose import ComposedPolicy
from nextscale.methods.nova import NOVA
from nextscale.methods.policy import Group, Policy, PolicyContext, ScaleContext, ScalePlan
from nextscale.methods.selection import Selection, topk_select


@dataclass(frozen=True)
class RandomSelection(Method):
    """Everything is the other method's, except which tokens stay."""

    name = "random_selection"
    summary = "Keeps as many tokens as another method does, chosen at random."

    like: Method = field(default_factory=NOVA)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("seed", 0, 2**31)

    def start(self, context: PolicyContext) -> Policy:
        return RandomPolicy(context, self.like.begin(context), self)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "fields": {"like": self.like.to_dict(), "seed": self.seed}}


class RandomPolicy(ComposedPolicy):
    def __init__(self, context: PolicyContext, like: Policy, method: RandomSelection) -> None:
        super().__init__(context, [like])
        self.method = method
        key = self.capabilities.graph_key  # the seed only makes numbers, which are uploaded
        self.capabilities = dataclasses.replace(self.capabilities, graph_key=key and (RandomSelection, key))

    def plan_scale(self, scale: Scale) -> ScalePlan:
        plan = super().plan_scale(scale)
        if plan.needs_hidden:  # here, for a captured scale cannot draw them
            noise = [self._noise(scale, layer, group) for layer in range(self.context.depth) for group in plan.groups]
            self.upload(f"noise {scale.index}", torch.stack(noise))
        self.groups = plan.groups
        return plan

    def _noise(self, scale: Scale, layer: int, group: Group) -> Tensor:
        """The same order for every image and row: a batch draws what single runs draw."""
        key = f"{self.method.seed}/{scale.index}/{layer}/{group}".encode()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") % (2**31 - 1))
        return torch.rand(scale.tokens, generator=generator, dtype=torch.float32)

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        chosen = super().select(layer, group, x, ctx)
        if chosen is None:
            return None
        noise = self.uploads[f"noise {ctx.scale.index}"][layer * len(self.groups) + self.groups.index(group)]
        return topk_select(noise.expand(len(x), -1), chosen.count)
