"""An experiment, not a method to use: a share of the tokens leaves some layers, in an order of its own."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import Group, PolicyContext, ScaleContext
from nextscale.methods.selection import Selection, for_rows, topk_select
from nextscale.methods.toprovar import ToProVAR, ToProVARPolicy

ORDERS = ("low", "high", "random")


@dataclass(frozen=True)
class Prune(Method):
    """Tokens are dropped from all scales behind ToProVAR's representative one. Salience is low where attention entropy
    is high: that of the scale before, in the mean over layers, so that a token leaves all layers or none."""

    name = "prune"
    summary = "Drops a share of the tokens by their salience, from all or some layers."

    share: float = 0.5  # of the tokens, to drop
    first: str = "low"  # which salience leaves first: low | high | random
    layers: tuple[int, ...] = ()  # that are pruned, from 1; none: all
    like: ToProVAR = field(default_factory=ToProVAR)  # how entropies are kept and tokens restored

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("share", 0, 1, below=True)
        self.require_one_of("first", ORDERS)

    def start(self, context: PolicyContext) -> PrunePolicy:
        policy = PrunePolicy(context, self)
        if policy.landmark + 1 >= len(context.schedule):
            raise NextscaleError(
                f"pruning begins behind scale {policy.landmark + 1}, but this schedule has {len(context.schedule)}"
            )
        return policy


class PrunePolicy(ToProVARPolicy):
    def __init__(self, context: PolicyContext, method: Prune) -> None:
        super().__init__(context, method.like)
        self.capabilities = dataclasses.replace(self.capabilities, graph_key=None)
        self.prune = method
        self.layers = {j - 1 for j in method.layers} or set(range(context.depth))

    def _first(self, image: int) -> int:
        return self.landmark + 2

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        scale: Scale = ctx.scale
        if scale.index <= self.landmark or not self.prune.share:
            return None
        if not layer:
            self.order = self._order(ctx)
        if layer not in self.layers:
            return None
        count = max(round(scale.tokens * (1 - self.prune.share)), 1)
        counts = torch.full((ctx.rows.images,), count, device=x.device)
        return for_rows(ctx.rows, functools.partial(topk_select, self.order, counts))

    def _order(self, ctx: ScaleContext) -> Tensor:
        """What stays has most of it, [B, N]."""
        if self.prune.first == "random":
            generator = torch.Generator().manual_seed(ctx.scale.index)
            noise = torch.rand(ctx.scale.tokens, generator=generator, dtype=torch.float32)
            return noise.to(self.context.device).expand(ctx.rows.images, -1)
        maps = [self._entropy(layer, ctx) for layer in range(self.context.depth)]
        entropy = torch.stack([map_ / map_.mean(1, keepdim=True) for map_ in maps]).mean(0)
        return -entropy if self.prune.first == "low" else entropy
