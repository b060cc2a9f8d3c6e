"""What every method computed at the last scales (ToProVAR and SparseVAR, Figure 7 of each)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nextscale.engine.output import Output
from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.watch import thumbnail

LAST_SCALES = 5  # which have nearly all tokens


def measure(outputs: Mapping[str, Output], prompt: str | int) -> Data:
    """The share of layers that computed each cell, per method and scale."""
    trace = next(iter(outputs.values())).trace
    data: Data = {
        "model": trace.header["model"],
        "prompt": prompt,
        "seed": trace.images[0].seed,
        "grids": [list(g) for g in trace.schedule.grids],
        "names": list(outputs),
        "methods": [output.trace.header["method"] for output in outputs.values()],
        "share": [round(output.trace.share(), 5) for output in outputs.values()],
        "pictures": [thumbnail(output.images[0]) for output in outputs.values()],
    }
    for i, output in enumerate(outputs.values()):
        data[f"maps_{i}"] = [to_half(output.trace.computed(0, s.index + 1)) for s in output.trace.schedule]
    return data


def draw(data: Data, path: Path) -> None:
    names, grids = data["names"], data["grids"]
    scales = range(max(len(grids) - LAST_SCALES, 0), len(grids))
    h, w = grids[-1]
    side = 8.4 / (len(scales) + 1) * h / w
    figure = style.new_figure(0.8 + len(names) * (side + 0.32))
    grid = figure.subplots(len(names), len(scales) + 1, squeeze=False)
    mappable = None
    for i, (line, name) in enumerate(zip(grid, names, strict=True)):
        style.show_image(line[0], data["pictures"][i], f"{100 * data['share'][i]:.0f} % of all tokens")
        line[0].set_ylabel(style.escape_dollars(name), fontsize=10)
        for axes, scale in zip(line[1:], scales, strict=True):
            map_ = data[f"maps_{i}"][scale].astype(np.float32)
            rows, cells = grids[scale]
            head = f"scale {scale + 1}, {rows}×{cells}\n" if i == 0 else ""
            mappable = style.show_image(axes, map_, f"{head}{100 * map_.mean():.0f} %", vmin=0, vmax=1, cmap=style.CMAP)
    bar = figure.colorbar(mappable, ax=grid, location="right", aspect=40, pad=0.01, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["none", "half", "all"], fontsize=9)
    bar.set_label("layers that computed a cell", fontsize=9)
    style.set_title(figure, "What each method computed at the last scales", data)
    style.save(figure, path)
