"""Entropy of every token at every scale, beside the picture so far (NOVA, Figure 3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nextscale.research.analyze.data import Data, small
from nextscale.research.analyze.style import MAPS, canvas, entitle, picture, rows_of, save
from nextscale.research.analyze.watch import Watched

MOST = 7  # scales side by side


def measure(watched: Watched) -> Data:
    return {
        **watched.about(),
        "unit": "nats per token, conditional prediction",
        "pictures": watched.pictures,
        "entropy": [small(m) for m in watched.conditional],
    }


def draw(data: Data, path: Path) -> None:
    maps = [m.astype(np.float32) for m in data["entropy"]]
    high = max(float(np.quantile(m, 0.99)) for m in maps) or 1.0
    bands = rows_of(range(len(maps)), MOST)
    columns = len(bands[0])
    h, w = data["grids"][-1]
    side = 9.2 / columns * h / w
    figure = canvas(0.8 + len(bands) * (2 * side + 0.5))
    grid = figure.subplots(2 * len(bands), columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    shown = None
    for b, band in enumerate(bands):
        for column, scale in enumerate(band):
            above, below = grid[2 * b][column], grid[2 * b + 1][column]
            (rows, cells), mean = maps[scale].shape, maps[scale].mean()
            picture(above, data["pictures"][scale], f"scale {scale + 1}")
            shown = picture(below, maps[scale], f"{rows}×{cells}, mean {mean:.1f}", vmin=0, vmax=high, cmap=MAPS)
    bar = figure.colorbar(shown, ax=grid, location="right", aspect=40, pad=0.01)
    bar.set_label("entropy of a token, nats", fontsize=9)
    bar.ax.tick_params(labelsize=9)
    entitle(figure, "The picture after every scale, and the entropy of that scale's tokens", data)
    save(figure, path)
