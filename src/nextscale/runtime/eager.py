"""The plain way to run a planned scale: the only place that gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nextscale.guidance import combine_inside
from nextscale.kv import LayerCache
from nextscale.methods.base import Policy, ScalePlan, Stats, gather
from nextscale.models.base import Backbone
from nextscale.run import Rows
from nextscale.schedule import Scale


class Eager:
    name = "eager"

    def run_blocks(
        self,
        backbone: Backbone,
        state: Any,
        x: Tensor,
        scale: Scale,
        plan: ScalePlan,
        policy: Policy,
        rows: Rows,
        kv: Sequence[LayerCache],
        guide_after: dict[int, float],
    ) -> tuple[Tensor, Stats]:
        """x [R, N, C] through all blocks; `guide_after` holds the guidance weight of the blocks that have one."""
        stats = Stats()
        positions = backbone.positions(state, scale)
        for layer in range(backbone.depth):
            kept: dict[str, Tensor | None] = {}
            for group in plan.groups:
                chosen = policy.select(layer, group, x)
                count = None if chosen is None else chosen.count
                places = None if positions is None else gather(positions, chosen)
                y = gather(x, chosen)
                for part in group:
                    y = y + backbone.compute(state, layer, part, y, places, kv[layer], count)
                    kept[part] = count
                x = policy.fill(layer, group, x, chosen, y)
            if layer in guide_after:
                x = combine_inside(x, rows.images, rows.guided, guide_after[layer])
            stats.kept.append(kept)
        return x, stats
