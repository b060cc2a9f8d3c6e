"""Entropy per scale, with the band over prompts and seeds (NOVA, Figure 4b)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nextscale.research.analyze import style
from nextscale.research.analyze.band import Band
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.watch import Watched

KINDS = {"conditional": "conditional prediction, raw", "guided": "after temperature and guidance"}


def measure(band: Band, watched: Watched) -> Data:
    """Mean entropy of a token at every scale: of each image of the band, and of the one that is watched."""
    return {
        **band.about(),
        "grids": [list(g) for g in watched.grids],
        "unit": "nats per token",
        **{kind: getattr(band, kind).round(5).tolist() for kind in KINDS},
        "watched": {
            "prompt": watched.prompt,
            **{kind: [round(float(m.mean()), 5) for m in getattr(watched, kind)] for kind in KINDS},
        },
    }


def draw(data: Data, path: Path) -> None:
    figure = style.new_figure(4.4)
    panels = figure.subplots(1, 2, sharey=True)
    scales = range(1, len(data["grids"]) + 1)
    for axes, (kind, title), color in zip(panels, KINDS.items(), (style.BLUE, style.ORANGE), strict=True):
        _curve(axes, scales, np.array(data[kind]), data["watched"], kind, color)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("scale (tokens per side below)")
        axes.set_xticks(scales, [f"{t}\n{style.side(*grid)}" for t, grid in enumerate(data["grids"], start=1)])
        axes.tick_params(labelsize=9)
        axes.set_ylim(0, None)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        style.plain_axes(axes)
        axes.legend(fontsize=9, frameon=False, loc="best")
    panels[0].set_ylabel("mean entropy of a token, nats")
    figure.suptitle(f"Entropy per scale, {data['model']}: {_over(data)}", fontsize=12)
    style.save(figure, path)


def _over(data: Data) -> str:
    images, prompts = len(data["prompts"]), len(set(data["prompts"]))
    if images == 1:
        return "one image, so there is no band"
    return f"{prompts} prompts" if images == prompts else f"{images} images of {prompts} prompts"


def _curve(axes: Any, scales: range, values: np.ndarray, watched: Data, kind: str, color: str) -> None:
    if len(values) > 1:
        axes.fill_between(scales, values.min(0), values.max(0), color=color, alpha=0.15, lw=0, label="range")
        low, high = np.quantile(values, (0.1, 0.9), axis=0)
        axes.fill_between(scales, low, high, color=color, alpha=0.35, lw=0, label="10 to 90 %")
        axes.plot(scales, values.mean(0), "o-", color=color, ms=4, label="mean of the images")
    name = style.escape_dollars(style.quoted(watched["prompt"], 34))
    axes.plot(scales, watched[kind], "s--", color=style.BLACK, ms=3.5, lw=1.2, label=name)
