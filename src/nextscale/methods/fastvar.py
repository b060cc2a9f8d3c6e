"""FastVAR: each sub-layer keeps the tokens farthest from the mean, the rest get what one earlier scale added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import (
    Activation,
    Capabilities,
    Explanation,
    Group,
    Policy,
    PolicyContext,
    ScaleContext,
    ScalePlan,
)
from nextscale.methods.selection import Selection, scatter, topk_select
from nextscale.methods.tables import read_table, relative_ratio


@dataclass(frozen=True)
class FastVAR(Method):
    """As its public code does it, with scales and layers as shares of the schedule and the depth.

    Presets: "infinity" and "hart" hold the published constants.
    """

    name = "fastvar"
    summary = "Prunes fixed shares at the last scales by distance to the mean, refills from one cached scale."
    paper = "FastVAR"

    scale_table: str = "fastvar"  # share dropped by relative scale; 1 = the scale is left out
    first_layer: float = 3 / 32  # layers before this share of the depth are complete
    last_layer: float = 28 / 32  # and those from this one on
    restore_mode: str = "area"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("first_layer", 0, 1)
        self.require("last_layer", 0, 1)
        self.require_one_of("restore_mode", ("nearest", "area", "bilinear", "bicubic"))
        read_table(self.scale_table)

    def start(self, context: PolicyContext) -> Policy:
        policy = FastVARPolicy(context, self)
        if policy.ratios[0]:
            raise NextscaleError(
                f"fastvar would prune the first of {len(context.schedule)} scales: use a longer schedule"
            )
        return policy


class FastVARPolicy(Policy):
    def __init__(self, context: PolicyContext, method: FastVAR) -> None:
        super().__init__(context)
        self.method = method
        self.capabilities = Capabilities(reads_features=False, kv_tokens=0, graph_key=method)
        scales = len(context.schedule)
        table = read_table(method.scale_table)
        self.ratios = [relative_ratio(table, (k + 1) / scales) for k in range(scales)]
        self.first = next((k for k, ratio in enumerate(self.ratios) if ratio), scales)  # the first pruned scale
        self.layers = range(round(method.first_layer * context.depth), round(method.last_layer * context.depth))

    def plan_scale(self, scale: Scale) -> ScalePlan:
        action = "skip" if self.ratios[scale.index] >= 1 else "run"
        groups = tuple((sublayer,) for sublayer in self.context.sublayers)  # each sub-layer selects for itself
        return self.plan(scale, actions=(action,) * self.context.images, groups=groups)

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        ratio = self.ratios[ctx.scale.index]
        if not ratio or layer not in self.layers:
            return None
        kept = ctx.scale.tokens - int(ctx.scale.tokens * ratio)
        score = (x - x.mean(dim=1, keepdim=True)).square().sum(-1)  # every row for itself, as in the original
        return topk_select(score, torch.full((len(x),), kept, device=x.device))

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        if chosen is None:
            if ctx.scale.index == self.first - 1 and layer in self.layers:
                self.memory[layer, group].store(ctx.rows, ctx.scale.grid, y - x)
            return y
        cached = self.memory[layer, group].read(ctx.rows, ctx.scale.grid, self.method.restore_mode)
        assert cached is not None, "every image ran the cached scale"
        return scatter(x + cached, chosen, y)

    def explain(self, image: int) -> Explanation:
        if self.first == len(self.context.schedule):
            return Explanation()
        return Explanation(Activation(scale=self.first + 1, reason="fixed"))
