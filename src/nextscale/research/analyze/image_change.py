"""What the last scales change in the image (SparseVAR, Figure 2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.watch import Watched, thumbnail

LAST_SCALES = 5


def measure(watched: Watched) -> Data:
    """|image after a scale - image before it|, mean over the colors; for all scales as one number too."""
    changes = [_change(new, old) for new, old in zip(watched.images[1:], watched.images, strict=False)]
    first = max(len(changes) - LAST_SCALES, 0)
    return {
        **watched.about(),
        "unit": "mean over the colors of the absolute difference, colors in 0..1",
        "mean": [round(float(c.mean()), 6) for c in changes],  # from scale 2 on
        "flat": [round(float((c < 1 / 255).mean()), 5) for c in changes],  # pixels that hardly change
        "shown": list(range(first + 2, len(changes) + 2)),
        "pictures": watched.thumbnails[first + 1 :],
        "changes": [to_half(c) for c in changes[first:]],
    }


def _change(new: Image.Image, old: Image.Image) -> np.ndarray:
    a, b = (np.asarray(thumbnail(p), dtype=np.float32) / 255 for p in (new, old))
    return np.abs(a - b).mean(-1)


def draw(data: Data, path: Path) -> None:
    changes = [c.astype(np.float32) for c in data["changes"]]
    high = max(float(np.quantile(c, 0.995)) for c in changes) or 1.0
    h, w = data["grids"][-1]
    side = 8.8 / len(changes) * h / w
    figure = style.new_figure(2 * side + 1.2)
    grid = figure.subplots(2, len(changes), squeeze=False)
    mappable = None
    for column, scale, image, change in zip(grid.T, data["shown"], data["pictures"], changes, strict=True):
        rows, cells = data["grids"][scale - 1]
        style.show_image(column[0], image, f"after scale {scale} ({rows}×{cells})")
        still = f"mean {100 * data['mean'][scale - 2]:.2f} %, {100 * data['flat'][scale - 2]:.0f} % still"
        mappable = style.show_image(column[1], change, still, vmin=0, vmax=high, cmap=style.DIFFERENCE_CMAP)
    grid[0][0].set_ylabel("image", fontsize=10)
    grid[1][0].set_ylabel("change by the scale", fontsize=10)
    style.colorbar(figure, mappable, list(grid[1]), aspect=14)
    style.set_title(figure, "What each scale changes in the image (still: pixels that change by less than 1/255)", data)
    style.save(figure, path)
