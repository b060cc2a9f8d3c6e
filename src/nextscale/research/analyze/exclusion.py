"""An experiment, not a method to use: SparseVAR that excludes an exact share of the cells, by a measure of choice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.engine.rows import Rows
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import Group, Policy, PolicyContext, ScaleContext
from nextscale.methods.selection import Selection
from nextscale.methods.sparsevar import SparseVAR, SparseVARPolicy

MEASURES = ("block", "logits", "image", "random")


@dataclass(frozen=True)
class Exclude(Method):
    """Cells of the lowest measure are excluded, anchors never. Of the scale before, the measure is

    block   the mean squared change of the state by one block (SparseVAR's own),
    logits  one minus the cosine of a cell's logits and those of the scale before it, interpolated,
    image   the l1 difference that the scale made in the decoded image, in the mean over the pixels of a cell,
    random  any number.
    """

    name = "exclude"
    summary = "Excludes an exact share of the cells of every sparse scale."

    share: float = 0.5  # of the cells, to exclude
    measure: str = "block"
    like: SparseVAR = field(default_factory=SparseVAR)  # everything else

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("share", 0, 1, below=True)
        self.require_one_of("measure", MEASURES)

    def start(self, context: PolicyContext) -> Policy:
        policy = ExcludePolicy(context, self)
        if policy.first < 2:
            raise NextscaleError(
                f"the measures of exclusion compare two scales before the first sparse one, which is {policy.first + 1}"
            )
        return policy


class ExcludePolicy(SparseVARPolicy):
    def __init__(self, context: PolicyContext, method: Exclude) -> None:
        super().__init__(context, method.like)
        self.exclude = method
        by_image = method.measure == "image"
        self.capabilities = dataclasses.replace(self.capabilities, reads_features=by_image, graph_key=None)
        self.decoded: Tensor | None = None  # after the scale before
        self.logits: Tensor | None = None  # of the scale before, [B, V, h, w]
        self.measured: list[np.ndarray] = []  # of the images, before the first sparse scale, [h, w]

    def _low(self, change: Tensor, excluded: Tensor | None, anchors: Tensor) -> Tensor:
        count = min(round(change.shape[1] * self.exclude.share), int((~anchors).sum()))
        rank = change if excluded is None else change.masked_fill(excluded, -torch.inf)  # who is out stays out
        order = rank.masked_fill(anchors, torch.inf).argsort(dim=1, stable=True)
        low = torch.zeros_like(change, dtype=torch.bool).scatter(1, order[:, :count], True)
        return low if excluded is None else low | (excluded & anchors)  # which are computed, so they do not count

    def _measures(self, ctx: ScaleContext, earlier: int = 0) -> bool:
        return self.first - 1 - earlier <= ctx.scale.index < len(self.context.schedule) - 1

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        if self.exclude.measure != "block":
            return Policy.restore(self, layer, group, x, chosen, y, ctx)
        restored = super().restore(layer, group, x, chosen, y, ctx)
        if layer == self.block and ctx.scale.index == self.first - 1:
            known = self.memory["change"].read(Rows(ctx.rows.image_ids, ()), ctx.scale.grid, "nearest")
            assert known is not None
            self._show(known[..., 0], ctx)
        return restored

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        super().on_logits(x, raw, logits, ctx)
        if self.exclude.measure == "random" and self._measures(ctx):
            noise = torch.rand(ctx.scale.tokens, generator=torch.Generator().manual_seed(ctx.scale.index))
            self._store(noise.to(raw.device).expand(ctx.rows.images, -1), ctx)
        if self.exclude.measure != "logits" or not self._measures(ctx, earlier=1):
            return
        grid, now = ctx.scale.grid, raw[: ctx.rows.images].flatten(2).float().mT.unflatten(2, ctx.scale.grid)
        if self.logits is not None:
            before = F.interpolate(self.logits, size=grid, mode="bilinear")
            self._store(1 - F.cosine_similarity(now, before, dim=1).flatten(1), ctx)
        self.logits = now

    def on_features(self, features: Tensor, ctx: ScaleContext) -> None:
        if self.exclude.measure != "image" or not self._measures(ctx, earlier=1):
            return
        assert self.context.decode is not None
        image = self.context.decode(features)
        if self.decoded is not None:
            change = (image - self.decoded).abs().mean(1, keepdim=True)
            self._store(F.interpolate(change, size=ctx.scale.grid, mode="area").flatten(1), ctx)
        self.decoded = image

    def _store(self, change: Tensor, ctx: ScaleContext) -> None:
        if self._measures(ctx):
            self.memory["change"].store(Rows(ctx.rows.image_ids, ()), ctx.scale.grid, change[..., None])
            self._show(change, ctx)

    def _show(self, change: Tensor, ctx: ScaleContext) -> None:
        if ctx.scale.index == self.first - 1:
            self.measured = [map_.view(ctx.scale.grid).float().cpu().numpy() for map_ in change]
