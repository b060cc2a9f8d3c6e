"""Entropy before every layer, seen through the model's own head (NOVA, Figure 4c)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.watch import Watched

MAX_COLUMNS, MAX_MAPS = 6, 18
RELATIVE_SCALE = 10 / 13  # whose maps are drawn
MAX_CURVES = 5


def measure(watched: Watched) -> Data:
    """Maps of one scale; means of all. The last entry of each is the model's actual prediction."""
    scale = max(round(RELATIVE_SCALE * len(watched.grids)), 1) - 1
    stacks = [
        np.concatenate((lens, final[None])) for lens, final in zip(watched.logit_lens, watched.conditional, strict=True)
    ]
    return {
        **watched.about(),
        "unit": "nats per token, conditional prediction of the head on a layer's input",
        "scale": scale + 1,
        "maps": to_half(stacks[scale]),
        "means": [[round(float(m.mean()), 5) for m in stack] for stack in stacks],
    }


def draw(data: Data, path: Path) -> None:
    maps = data["maps"].astype(np.float32)
    depth = len(maps) - 1
    names = [f"before layer {j + 1}" for j in range(depth)] + ["prediction"]
    drawn = np.unique(np.linspace(0, depth, min(depth + 1, MAX_MAPS)).round().astype(int))
    rows = style.split_rows(drawn, MAX_COLUMNS)
    h, w = maps.shape[1:]
    side = 9.0 / len(rows[0]) * h / w
    figure = style.new_figure(0.6 + len(rows) * (side + 0.3) + 3.2)
    upper, lower = figure.subfigures(2, 1, height_ratios=(len(rows) * (side + 0.3), 3.2))
    high = float(np.quantile(maps, 0.99)) or 1.0

    def show(axes: Any, j: int) -> Any:
        return style.show_image(axes, maps[j], f"{names[j]}: {maps[j].mean():.1f}", vmin=0, vmax=high, cmap=style.CMAP)

    grid, mappable = style.show_grid(upper, rows, show)
    style.colorbar(upper, mappable, grid, "entropy, nats")
    style.set_title(upper, f"Entropy layer by layer at scale {data['scale']} ({h}×{w}), with its mean", data)
    _means(lower.subplots(), data, depth)
    style.save(figure, path)


def _means(axes: Any, data: Data, depth: int) -> None:
    scales = np.unique(np.linspace(1, len(data["means"]), MAX_CURVES).round().astype(int))
    for scale, color in zip(scales, style.gradient(len(scales)), strict=True):
        h, w = data["grids"][scale - 1]
        axes.plot(range(depth + 1), data["means"][scale - 1], "o-", color=color, ms=4, label=f"scale {scale} ({h}×{w})")
    ticks = range(0, depth, 1 + depth // 20)
    axes.set_xticks([*ticks, depth], [*(str(j + 1) for j in ticks), "prediction"], fontsize=9)
    axes.set(xlabel="input of layer", ylabel="mean entropy, nats", ylim=(0, None))
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    style.plain_axes(axes)
