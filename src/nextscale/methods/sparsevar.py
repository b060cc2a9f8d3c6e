"""SparseVAR: cells of low frequency leave the computation for good; anchors stand in for them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.engine.rows import Rows
from nextscale.engine.schedule import Grid, Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import Activation, Capabilities, Explanation, Group, Policy, PolicyContext, ScaleContext
from nextscale.methods.selection import Selection, for_rows, gather, topk_select
from nextscale.methods.token_cache import store_selected


@dataclass(frozen=True)
class SparseVAR(Method):
    """Important: `tau`; the paper publishes 0.4 to 0.7. `block` is 0.5 for Infinity and 0.67 for HART."""

    name = "sparsevar"
    summary = "Excludes low-frequency cells from all later scales and copies them from similar anchor tokens."
    paper = "Frequency-Aware Autoregressive Modeling for Efficient High-Resolution Image Synthesis"

    start_scale: float = 10 / 13  # share of the schedule at which exclusion begins
    tau: float = 0.6  # a cell is low-frequency below this share of the largest change
    block: float = 0.5  # the block whose change is measured, as a share of the depth: 16 of 32, counted from 1
    anchor: int = 4  # the top-left token of every anchor x anchor cell always stays; 0: there are no anchors
    similarity: float = 0.9  # below it, an excluded cell adds nothing
    restore_mode: str = "bilinear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("start_scale", 0, 1, above=True)
        self.require("tau", 0, 1)
        self.require("block", 0, 1)
        self.require("anchor", 0, 1000)
        self.require("similarity", -1, 1)
        self.require_one_of("restore_mode", ("nearest", "area", "bilinear", "bicubic"))

    def start(self, context: PolicyContext) -> Policy:
        policy = SparseVARPolicy(context, self)
        if policy.first < 1:
            raise NextscaleError(f"sparsevar cannot start at the first of {len(context.schedule)} scales")
        return policy


class SparseVARPolicy(Policy):
    def __init__(self, context: PolicyContext, method: SparseVAR) -> None:
        super().__init__(context)
        self.method = method
        self.capabilities = Capabilities(reads_features=False, kv_tokens=0, graph_key=method)
        self.first = math.ceil(method.start_scale * len(context.schedule) - 1e-9) - 1  # index of the first sparse scale
        self.block = max(round(method.block * context.depth) - 1, 0)  # its index
        # Its memory, all of the conditional rows: how much the block changed each cell ("change"), the cells that
        # are out ("excluded"), and the logits of the scale before.
        self.keep: Tensor | None = None  # [B, N] of this scale
        self.chosen: Selection | None = None

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        if ctx.scale.index < self.first:
            self.chosen = self.keep = None
        elif layer == 0:
            self._decide(ctx)
        return self.chosen

    def _decide(self, ctx: ScaleContext) -> None:
        """One selection for the whole scale."""
        grid, images = ctx.scale.grid, Rows(ctx.rows.image_ids, ())
        change = self.memory["change"].read(images, grid, self.method.restore_mode)
        assert change is not None, "every image ran the scale before"
        before = self.memory["excluded"].read(images, grid, "nearest")
        excluded = None if before is None else before[..., 0] > 0
        anchors = self._anchors(grid, change.device)
        low = self._low(change[..., 0], excluded, anchors)
        self.memory["excluded"].store(images, grid, low.float()[..., None])  # anchors, too: on the next grid others are
        self.keep = keep = ~low | anchors
        self.chosen = for_rows(ctx.rows, functools.partial(topk_select, keep.float(), keep.sum(1)))

    def _low(self, change: Tensor, excluded: Tensor | None, anchors: Tensor) -> Tensor:
        """The cells [B, N] that are out: those that changed little, and those that were out; anchors run anyway."""
        low = change < self.method.tau * change.amax(1, keepdim=True)
        return low if excluded is None else low | excluded

    def _anchors(self, grid: Grid, device: torch.device) -> Tensor:
        if not self.method.anchor:
            return torch.zeros(grid[0] * grid[1], dtype=torch.bool, device=device)
        rows, columns = (torch.arange(n, device=device) % self.method.anchor == 0 for n in grid)
        return (rows[:, None] & columns).flatten()

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        scale, images = ctx.scale, ctx.rows.images
        if layer == self.block and self.first - 1 <= scale.index < len(self.context.schedule) - 1:
            own = None if chosen is None else chosen.first(images)
            moved = (y[:images] - gather(x[:images], own)).square().mean(-1, keepdim=True)
            which = Rows(ctx.rows.image_ids, ())
            store_selected(self.memory["change"], which, scale.grid, own, moved, self.method.restore_mode)
        return super().restore(layer, group, x, chosen, y, ctx)

    def finalize(self, x: Tensor, ctx: ScaleContext) -> tuple[Tensor, Tensor | None]:
        """Excluded cells take the state of the anchor whose earlier logits are most like theirs."""
        if self.keep is None:
            return x, None
        if not self.method.anchor:  # nobody to copy from
            return x, self.keep.to(x.dtype)
        m, grid = self.method, ctx.scale.grid
        before = self.memory["logits"].read(Rows(ctx.rows.image_ids, ()), grid, m.restore_mode)
        assert before is not None
        across, down = (torch.arange(0, n, m.anchor, device=x.device) for n in reversed(grid))
        anchors = (down[:, None] * grid[1] + across).flatten()
        unit = F.normalize(before, dim=-1)
        likeness = unit @ unit[:, anchors].transpose(1, 2)  # [B, N, A]
        # Enlarged maps repeat themselves, so equal anchors are common: the first of them, not the luckiest rounding.
        tied = likeness >= likeness.amax(-1, keepdim=True) - 1e-5
        nearest = (tied * torch.arange(len(anchors), 0, -1, device=x.device)).argmax(dim=-1)
        likeness = likeness.gather(2, nearest[..., None])[..., 0]
        own = torch.arange(ctx.scale.tokens, device=x.device).expand_as(nearest)
        copied = ~self.keep & (likeness >= m.similarity)
        source = torch.where(copied, anchors[nearest], own)
        x = gather(
            x, Selection(ctx.rows.expand_to_rows(source), torch.full((len(x),), source.shape[1], device=x.device))
        )
        return x, (self.keep | copied).to(x.dtype)

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        scale: Scale = ctx.scale
        if self.first - 1 <= scale.index < len(self.context.schedule) - 1:
            self.memory["logits"].store(Rows(ctx.rows.image_ids, ()), scale.grid, raw[: ctx.rows.images].flatten(2))

    def explain(self, image: int) -> Explanation:
        return Explanation(Activation(scale=self.first + 1, reason="fixed"))
