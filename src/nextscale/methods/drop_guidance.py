"""Run the last scales without the unconditional branch."""

from __future__ import annotations

from dataclasses import dataclass

from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import HOST_ONLY, Activation, Explanation, Policy, PolicyContext, ScalePlan


@dataclass(frozen=True)
class DropGuidance(Method):
    """Half of the rows of a guided run are its unconditional ones; late scales need them least."""

    name = "drop_guidance"
    summary = "Runs the scales from a given one on without the unconditional branch."

    from_scale: int = 10  # the first unguided scale, from 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("from_scale", 1, 1000)

    def start(self, context: PolicyContext) -> Policy:
        if not context.sampling.guided_until:
            raise NextscaleError("drop_guidance needs a guided run, and guidance_scale switches guidance off")
        if self.from_scale > len(context.schedule):
            raise NextscaleError(
                f"drop_guidance: from_scale = {self.from_scale} lies beyond the last scale, {len(context.schedule)}"
            )
        return DropGuidancePolicy(context, self)


class DropGuidancePolicy(Policy):
    capabilities = HOST_ONLY

    def __init__(self, context: PolicyContext, method: DropGuidance) -> None:
        super().__init__(context)
        self.from_scale = method.from_scale

    def plan_scale(self, scale: Scale) -> ScalePlan:
        if scale.index + 1 < self.from_scale:
            return self.plan(scale)
        return self.plan(scale, guided=(False,) * self.context.images)

    def explain(self, image: int) -> Explanation:
        return Explanation(Activation(scale=self.from_scale, reason="fixed"))
