"""An experiment, not a method to use: a plain run that drops and restores the most certain tokens of one scale."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from nextscale.engine.rows import Rows
from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import Group, PolicyContext, ScaleContext, ScalePlan
from nextscale.methods.restore import CachedPolicy
from nextscale.methods.selection import Selection, for_rows, topk_select


@dataclass(frozen=True)
class RestoreScale(Method):
    """NOVA's literal reading at one scale: cells of low entropy at the scale before leave all layers, are restored from
    the residual cache of the scale before, and sampled. All scales before are those of the plain run."""

    name = "restore_scale"
    summary = "Drops and restores the most certain tokens of one scale."

    scale: int = 2  # from 1
    share: float = 0.5  # of its tokens, to drop
    restore_mode: str = "bilinear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("scale", 2, 1000)
        self.require("share", 0, 1, below=True)
        self.require_one_of("restore_mode", ("nearest", "area", "bilinear", "bicubic"))

    def start(self, context: PolicyContext) -> RestoreScalePolicy:
        if self.scale > len(context.schedule):
            raise NextscaleError(f"there is no scale {self.scale}: this schedule has {len(context.schedule)}")
        return RestoreScalePolicy(context, self)


class RestoreScalePolicy(CachedPolicy):
    def __init__(self, context: PolicyContext, method: RestoreScale) -> None:
        super().__init__(context, "residual", method.restore_mode, after=method.scale - 2)
        self.capabilities = dataclasses.replace(self.capabilities, graph_key=None)
        self.method = method

    def plan_scale(self, scale: Scale) -> ScalePlan:
        return self.plan(scale, needs_hidden=self.method.scale - 2 <= scale.index < self.method.scale)

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        if ctx.scale.index != self.method.scale - 1:
            return None
        if not layer:
            images = Rows(ctx.rows.image_ids, ())
            entropy = self.memory["final"].read(images, ctx.scale.grid, self.method.restore_mode)
            assert entropy is not None, "every image ran the scale before"
            kept = max(ctx.scale.tokens - int(ctx.scale.tokens * self.method.share), 1)
            counts = torch.full((ctx.rows.images,), kept, device=x.device)
            self.chosen = for_rows(ctx.rows, functools.partial(topk_select, entropy[..., 0], counts))
        return self.chosen

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        if ctx.scale.index == self.method.scale - 2:
            entropy = ctx.token_entropy(raw[: ctx.rows.images], "token")
            self.memory["final"].store(Rows(ctx.rows.image_ids, ()), ctx.scale.grid, entropy[..., None])
