"""The plain way to run a planned scale: the only place that gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nextscale.guidance import combine, combine_inside
from nextscale.kv import LayerCache, Memory, WatchedCache
from nextscale.methods.base import Policy, ScalePlan, Stats
from nextscale.methods.selection import Selection, gather
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
        weight: float,
        guide_after: Sequence[int],
    ) -> tuple[Tensor, Stats]:
        """x [R, N, C] through all blocks; guidance of this `weight` is also applied after some of them."""

        def lens(hidden: Tensor, guided: bool, codes: Tensor | None = None) -> Tensor:
            """The model's own head on a state between two layers."""
            if guided:
                return combine(backbone.head(state, hidden), rows.images, rows.guided, weight)
            return backbone.head(state, hidden[: rows.images], codes)  # conditional rows come first

        stats = Stats(scale, rows, lens)
        positions = backbone.positions(state, scale)
        for layer in range(backbone.depth):
            memory: Memory = kv[layer]
            if "attention_entropy" in plan.needs:
                memory = WatchedCache(kv[layer], rows.images)
            taken: dict[str, Selection | None] = {}
            for group in plan.groups:
                chosen = policy.select(layer, group, x, stats)
                count = None if chosen is None else chosen.count
                places = None if positions is None else gather(positions, chosen)
                y = gather(x, chosen)
                for part in group:
                    y = y + backbone.compute(state, layer, part, y, places, memory, count)
                    taken[part] = chosen
                x = policy.fill(layer, group, x, chosen, y, stats)
            if layer in guide_after:
                x = combine_inside(x, rows.images, rows.guided, weight)
            stats.chosen.append(taken)
            if isinstance(memory, WatchedCache):
                stats.attention_entropy.append(memory.entropy)
        return x, stats
