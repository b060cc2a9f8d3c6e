"""The arithmetic of next-scale and of next-token generation over the size of the image (NOVA, Figure 2b)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nextscale.engine.schedule import EXTENDED, Schedule, infinity_schedule
from nextscale.engine.trace import Costs
from nextscale.pipeline import Pipeline
from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data

LEAST = 16  # tokens of the smallest image that is drawn


def measure(pipe: Pipeline, schedule: Schedule) -> Data:
    """FLOPs of one row of one image at every size that a prefix of the longest schedule makes.

    Settings are uniform: the same blocks and head, and an image of h x w tokens is either predicted scale by scale, or
    token by token in raster order, each seeing those before it. Keys of a text count in neither.
    """
    if schedule.pixel_budget is not None:
        schedule = infinity_schedule(schedule.aspect_ratio, EXTENDED)
    costs = Costs.of(pipe.backbone)
    ends = [k for k, (h, w) in enumerate(schedule.grids, start=1) if h * w >= LEAST] or [len(schedule)]
    prefixes = [dataclasses.replace(schedule, grids=schedule.grids[:end]) for end in ends]
    lasts = [flops(costs, [(schedule_.last, sum(h * w for h, w in schedule_.grids[:-1]))]) for schedule_ in prefixes]
    return {
        "model": pipe.spec.name,
        "unit": "FLOPs (multiply-adds x 2) of one guidance row, blocks and head",
        "grids": [list(each.last) for each in prefixes],
        "pixels": [[n * pipe.tokenizer.stride for n in each.last] for each in prefixes],
        "next_scale": [next_scale(costs, each) for each in prefixes],
        "next_token": [next_token(costs, each.last[0] * each.last[1]) for each in prefixes],
        "last_scale": lasts,
    }


def flops(costs: Costs, scales: list[tuple[tuple[int, int], int]]) -> int:
    """Of scales, each a grid behind as many tokens."""
    total = 0
    for (h, w), before in scales:
        keys = {"self": before + h * w}
        per_layer = sum(costs.flops(part, h * w, keys.get(part, 0)) for part in costs.parts)
        total += costs.depth * per_layer + h * w * costs.head
    return total


def next_scale(costs: Costs, schedule: Schedule) -> int:
    return flops(costs, [(scale.grid, scale.start) for scale in schedule])


def next_token(costs: Costs, tokens: int) -> int:
    """The i-th token sees i keys: its own, too."""
    fixed = sum(costs.per_token.values()) * tokens
    seen = costs.per_key["self"] * tokens * (tokens + 1) // 2
    return costs.depth * (fixed + seen) + tokens * costs.head


def draw(data: Data, path: Path) -> None:
    figure = style.new_figure(4.4)
    panels = figure.subplots(1, 2, width_ratios=(1.2, 1))
    sides = [(h * w) ** 0.5 for h, w in data["pixels"]]
    by_scale, by_token = ([value / 1e9 for value in data[key]] for key in ("next_scale", "next_token"))
    panels[0].plot(sides, by_scale, "o-", color=style.BLUE, ms=4, label="next scale (VAR)")
    panels[0].plot(sides, by_token, "s-", color=style.ORANGE, ms=4, label="next token, raster order")
    panels[0].set(yscale="log", ylabel="GFLOPs of one image and guidance row")
    ratios = [a / b for a, b in zip(by_scale, by_token, strict=True)]
    before = [(a - c) / b for a, c, b in zip(data["next_scale"], data["last_scale"], data["next_token"], strict=True)]
    panels[1].plot(sides, ratios, "o-", color=style.BLUE, ms=4, label="all scales")
    panels[1].plot(sides, before, "v--", color=style.SKY, ms=4, label="scales before the last one")
    panels[1].axhline(1, color=style.ORANGE, lw=1)
    panels[1].set(ylabel="next scale, as a multiple of next token", ylim=(0, None))
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("image side, pixels (square root of the area)")
        axes.tick_params(labelsize=9)
        axes.grid(color="0.92")
        axes.legend(fontsize=9, frameon=False)
        style.plain_axes(axes)
    figure.suptitle(f"Arithmetic over the size of the image, the transformer of {data['model']}", fontsize=12)
    style.save(figure, path)
