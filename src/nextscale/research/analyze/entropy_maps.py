"""Entropy of every token at every scale, beside the image so far (NOVA, Figure 3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.watch import Watched

MAX_COLUMNS = 7  # of scales


def measure(watched: Watched) -> Data:
    return {
        **watched.about(),
        "unit": "nats per token, conditional prediction",
        "pictures": watched.thumbnails,
        "entropy": [to_half(m) for m in watched.conditional],
    }


def draw(data: Data, path: Path) -> None:
    maps = [m.astype(np.float32) for m in data["entropy"]]
    high = max(float(np.quantile(m, 0.99)) for m in maps) or 1.0
    bands = style.split_rows(range(len(maps)), MAX_COLUMNS)
    columns = len(bands[0])
    h, w = data["grids"][-1]
    side = 9.2 / columns * h / w
    figure = style.new_figure(0.8 + len(bands) * (2 * side + 0.5))
    grid = figure.subplots(2 * len(bands), columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    mappable = None
    for b, band in enumerate(bands):
        for column, scale in enumerate(band):
            above, below = grid[2 * b][column], grid[2 * b + 1][column]
            (rows, cells), mean = maps[scale].shape, maps[scale].mean()
            style.show_image(above, data["pictures"][scale], f"scale {scale + 1}")
            mappable = style.show_image(
                below, maps[scale], f"{rows}×{cells}, mean {mean:.1f}", vmin=0, vmax=high, cmap=style.CMAP
            )
    style.colorbar(figure, mappable, grid, "entropy of a token, nats", aspect=40)
    style.set_title(figure, "The image after every scale, and the entropy of that scale's tokens", data)
    style.save(figure, path)
