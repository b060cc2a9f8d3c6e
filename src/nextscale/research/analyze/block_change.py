"""How much each block changes each cell at the last scales (SparseVAR, Figure 3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nextscale.research.analyze.data import Data, small
from nextscale.research.analyze.style import MAPS, canvas, entitle, picture, save
from nextscale.research.analyze.watch import Watched

BLOCKS, SCALES = 6, 3


def measure(watched: Watched) -> Data:
    """Mean squared change of the hidden state by a block, conditional row: maps of the last scales, means of all."""
    first = max(len(watched.moved) - SCALES, 0)
    return {
        **watched.about(),
        "unit": "mean squared change of the hidden state by a block",
        "shown": list(range(first + 1, len(watched.moved) + 1)),
        "means": [[float(f"{m.mean():.5g}") for m in stack] for stack in watched.moved],  # [scales][blocks]
        "maps": [small(_relative(stack)) for stack in watched.moved[first:]],
    }


def _relative(stack: np.ndarray) -> np.ndarray:
    """Each map as shares of its largest value: that is what SparseVAR's threshold is a share of."""
    return stack / np.maximum(stack.max((1, 2), keepdims=True), 1e-30)


def draw(data: Data, path: Path) -> None:
    depth = len(data["maps"][0])
    blocks = np.unique(np.linspace(0, depth - 1, min(depth, BLOCKS)).round().astype(int))
    h, w = data["grids"][-1]
    side = 8.6 / len(blocks) * h / w
    figure = canvas(0.9 + len(data["maps"]) * (side + 0.12))
    grid = figure.subplots(len(data["maps"]), len(blocks), squeeze=False)
    shown = None
    for i, (line, scale, stack) in enumerate(zip(grid, data["shown"], data["maps"], strict=True)):
        rows, cells = data["grids"][scale - 1]
        line[0].set_ylabel(f"scale {scale} ({rows}×{cells})", fontsize=10)
        for axes, block in zip(line, blocks, strict=True):
            title = "" if i else f"block {block + 1}"
            shown = picture(axes, stack[block].astype(np.float32), title, vmin=0, vmax=1, cmap=MAPS)
    bar = figure.colorbar(shown, ax=grid, location="right", aspect=30, pad=0.01)
    bar.set_label("change, share of the map's largest", fontsize=9)
    bar.ax.tick_params(labelsize=9)
    entitle(figure, "How much each block changes each cell at the last scales", data)
    save(figure, path)
