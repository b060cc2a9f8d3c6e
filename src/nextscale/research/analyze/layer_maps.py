"""Entropy before every layer, seen through the model's own head (NOVA, Figure 4c)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nextscale.research.analyze.data import Data, small
from nextscale.research.analyze.style import MAPS, canvas, entitle, gradient, picture, plain_axes, rows_of, save
from nextscale.research.analyze.watch import Watched

MOST, SHOWN = 6, 18  # maps side by side, and in all
PLACE = 10 / 13  # of the schedule: the scale whose maps are drawn
CURVES = 5


def measure(watched: Watched) -> Data:
    """Maps of one scale; means of all. The last entry of each is the model's actual prediction."""
    scale = max(round(PLACE * len(watched.grids)), 1) - 1
    stacks = [
        np.concatenate((lens, final[None])) for lens, final in zip(watched.logit_lens, watched.conditional, strict=True)
    ]
    return {
        **watched.about(),
        "unit": "nats per token, conditional prediction of the head on a layer's input",
        "scale": scale + 1,
        "maps": small(stacks[scale]),
        "means": [[round(float(m.mean()), 5) for m in stack] for stack in stacks],
    }


def draw(data: Data, path: Path) -> None:
    maps = data["maps"].astype(np.float32)
    depth = len(maps) - 1
    names = [f"before layer {j + 1}" for j in range(depth)] + ["prediction"]
    drawn = np.unique(np.linspace(0, depth, min(depth + 1, SHOWN)).round().astype(int))
    rows = rows_of(drawn, MOST)
    columns = len(rows[0])
    h, w = maps.shape[1:]
    side = 9.0 / columns * h / w
    figure = canvas(0.6 + len(rows) * (side + 0.3) + 3.2)
    upper, lower = figure.subfigures(2, 1, height_ratios=(len(rows) * (side + 0.3), 3.2))
    grid = upper.subplots(len(rows), columns, squeeze=False)
    shown = None
    for axes in grid.flat:
        axes.axis("off")
    for line, group in zip(grid, rows, strict=True):
        for axes, j in zip(line, group, strict=False):
            title = f"{names[j]}: {maps[j].mean():.1f}"
            shown = picture(axes, maps[j], title, vmin=0, vmax=float(np.quantile(maps, 0.99)) or 1.0, cmap=MAPS)
    bar = upper.colorbar(shown, ax=grid, location="right", aspect=30, pad=0.01)
    bar.set_label("entropy, nats", fontsize=9)
    bar.ax.tick_params(labelsize=9)
    entitle(upper, f"Entropy layer by layer at scale {data['scale']} ({h}×{w}), with its mean", data)
    _means(lower.subplots(), data, depth)
    save(figure, path)


def _means(axes: Any, data: Data, depth: int) -> None:
    scales = np.unique(np.linspace(1, len(data["means"]), CURVES).round().astype(int))
    for scale, color in zip(scales, gradient(len(scales)), strict=True):
        h, w = data["grids"][scale - 1]
        axes.plot(range(depth + 1), data["means"][scale - 1], "o-", color=color, ms=4, label=f"scale {scale} ({h}×{w})")
    ticks = range(0, depth, 1 + depth // 20)
    axes.set_xticks([*ticks, depth], [*(str(j + 1) for j in ticks), "prediction"], fontsize=9)
    axes.set(xlabel="input of layer", ylabel="mean entropy, nats", ylim=(0, None))
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    plain_axes(axes)
