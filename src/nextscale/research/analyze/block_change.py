"""How much each block changes each cell at the last scales (SparseVAR, Figure 3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.watch import Watched

MAX_BLOCKS, LAST_SCALES = 6, 3


def measure(watched: Watched) -> Data:
    """Mean squared change of the hidden state by a block, conditional row: maps of the last scales, means of all."""
    first = max(len(watched.moved) - LAST_SCALES, 0)
    return {
        **watched.about(),
        "unit": "mean squared change of the hidden state by a block",
        "shown": list(range(first + 1, len(watched.moved) + 1)),
        "means": [[float(f"{m.mean():.5g}") for m in stack] for stack in watched.moved],  # [scales][blocks]
        "maps": [to_half(_relative(stack)) for stack in watched.moved[first:]],
    }


def _relative(stack: np.ndarray) -> np.ndarray:
    """Divide each map by its largest value, as SparseVAR's threshold is a share of it."""
    return stack / np.maximum(stack.max((1, 2), keepdims=True), 1e-30)


def draw(data: Data, path: Path) -> None:
    depth = len(data["maps"][0])
    blocks = np.unique(np.linspace(0, depth - 1, min(depth, MAX_BLOCKS)).round().astype(int))
    h, w = data["grids"][-1]
    side = 8.6 / len(blocks) * h / w
    figure = style.new_figure(0.9 + len(data["maps"]) * (side + 0.12))
    grid = figure.subplots(len(data["maps"]), len(blocks), squeeze=False)
    mappable = None
    for i, (line, scale, stack) in enumerate(zip(grid, data["shown"], data["maps"], strict=True)):
        rows, cells = data["grids"][scale - 1]
        line[0].set_ylabel(f"scale {scale} ({rows}×{cells})", fontsize=10)
        for axes, block in zip(line, blocks, strict=True):
            title = "" if i else f"block {block + 1}"
            mappable = style.show_image(axes, stack[block].astype(np.float32), title, vmin=0, vmax=1, cmap=style.CMAP)
    style.colorbar(figure, mappable, grid, "change, share of the map's largest")
    style.set_title(figure, "How much each block changes each cell at the last scales", data)
    style.save(figure, path)
