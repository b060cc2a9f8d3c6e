"""The plain way to run a planned scale: the only place that gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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
        # Context tokens stand in front of the first scale: they are always computed, and methods do not see them.
        stats.context = before = x.shape[1] - scale.tokens
        for layer in range(backbone.depth):
            memory: Memory = kv[layer]
            if "attention_entropy" in plan.needs:
                memory = WatchedCache(kv[layer], rows.images)
            taken: dict[str, Selection | None] = {}
            for group in plan.groups:
                chosen = policy.select(layer, group, x[:, before:], stats)
                count = None if chosen is None else chosen.count + before
                places = None if positions is None else behind(positions, before, chosen)
                y = behind(x, before, chosen)
                for part in group:
                    y = y + backbone.compute(state, layer, part, y, places, memory, count)
                    taken[part] = chosen
                filled = policy.fill(layer, group, x[:, before:], chosen, y[:, before:], stats)
                x = torch.cat((y[:, :before], filled), dim=1) if before else filled
            if layer in guide_after:
                x = combine_inside(x, rows.images, rows.guided, weight)
            stats.chosen.append(taken)
            if isinstance(memory, WatchedCache):
                stats.attention_entropy.append(memory.entropy[:, before:])
        return x[:, before:], stats


def behind(x: Tensor, before: int, chosen: Selection | None) -> Tensor:
    """The context tokens and, behind them, the chosen ones."""
    if chosen is None or not before:
        return gather(x, chosen)
    taken = gather(x[:, before:], chosen)
    return torch.cat((x[:, :before].expand(len(taken), *x[:, :before].shape[1:]), taken), dim=1)
