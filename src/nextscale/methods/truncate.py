"""Leave out the last scales."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import HOST_ONLY, Activation, Explanation, Policy, PolicyContext, ScalePlan


@dataclass(frozen=True)
class Truncate(Method):
    """The image is decoded from the scales before; every cleverer method must beat this."""

    name = "truncate"
    summary = "Leaves out the last k scales and decodes what is there."

    k: int = 1  # scales to leave out

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("k", 0, 1000)

    def start(self, context: PolicyContext) -> Policy:
        if self.k >= len(context.schedule):
            raise NextscaleError(
                f"truncate: k = {self.k} leaves nothing of a schedule of {len(context.schedule)} scales"
            )
        return TruncatePolicy(context, self)


class TruncatePolicy(Policy):
    def __init__(self, context: PolicyContext, method: Truncate) -> None:
        super().__init__(context)
        self.first_left_out = len(context.schedule) - method.k
        tokens = sum(s.tokens for s in context.schedule if s.index < self.first_left_out)
        self.capabilities = dataclasses.replace(HOST_ONLY, kv_tokens=tokens)

    def plan_scale(self, scale: Scale) -> ScalePlan:
        if scale.index < self.first_left_out:
            return self.plan(scale)
        return self.plan(scale, actions=("stop",) * self.context.images)

    def explain(self, image: int) -> Explanation:
        if self.first_left_out == len(self.context.schedule):
            return Explanation()
        return Explanation(Activation(scale=self.first_left_out + 1, reason="fixed"))
