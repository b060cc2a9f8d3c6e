"""Measures of what SparseVAR could exclude: their maps, and the quality at equal shares (SparseVAR, Figure 6)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from nextscale.methods.sparsevar import SparseVAR
from nextscale.research.analyze import quality_curves, style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.exclusion import MEASURES, Exclude, ExcludePolicy
from nextscale.research.analyze.study import Study

SHARES = (0.3, 0.5, 0.7)
LABELS = {
    "block": "change by one block (MSE)",
    "logits": "change of the logits (cosine)",
    "image": "change of the image (l1)",
    "random": "random cells",
}
DRAWN_MAPS = ("block", "logits", "image")


def measure(study: Study) -> Data:
    """Maps of the prompt of the page, one scale before the first sparse one; the quality over all images."""
    like = study.setting(SparseVAR)
    curves = {name: functools.partial(Exclude, measure=name, like=like) for name in MEASURES}
    data = quality_curves.measure(study, curves, SHARES)
    maps = {name: measured(study, Exclude(SHARES[0], name, like)) for name in DRAWN_MAPS}
    shown = next(scale for scale, grid in enumerate(data["grids"], start=1) if tuple(grid) == maps["block"].shape)
    return {
        **data,
        "prompt": study.prompt,
        "seed": study.seed,
        "scale": shown,
        "block": like.block,
        "picture": study.watched.thumbnails[-1],
        "maps": [to_half(map_ / max(float(np.quantile(map_, 0.99)), 1e-30)) for map_ in maps.values()],
    }


def measured(study: Study, method: Exclude) -> np.ndarray:
    """The map [h, w] by which a method excludes the first cells of the prompt of the page."""
    out = study.pipe(study.prompt, seed=study.seed, method=method, output_type="latent", **study.size)
    policy = out.trace.policy
    assert isinstance(policy, ExcludePolicy)
    return policy.measured[0]


def draw(data: Data, path: Path) -> None:
    h, w = data["grids"][-1]
    side = 2.2 * h / w
    figure = style.new_figure(side + 5.0)
    upper, lower = figure.subfigures(2, 1, height_ratios=(side + 0.6, 4.4))
    panels = upper.subplots(1, 1 + len(DRAWN_MAPS))
    style.show_image(panels[0], data["picture"], "the image")
    mappable: Any = None
    for axes, name, map_ in zip(panels[1:], DRAWN_MAPS, data["maps"], strict=True):
        mappable = style.show_image(axes, map_.astype(np.float32), LABELS[name], vmin=0, vmax=1, cmap=style.CMAP)
    style.colorbar(upper, mappable, list(panels), "relative", aspect=14)
    style.set_title(upper, f"What would be excluded first (dark) after scale {data['scale']}", data)
    quality_curves.draw_panels(lower, data, LABELS, "cells excluded, of each sparse scale")
    style.save(figure, path)
