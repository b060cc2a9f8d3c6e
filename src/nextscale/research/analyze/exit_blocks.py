"""Which block's change tells best what can be left out, at an equal share excluded (SparseVAR, Figure 8)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from nextscale.io.progress import bar
from nextscale.methods.sparsevar import SparseVAR
from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.exclusion import Exclude
from nextscale.research.analyze.exit_measures import measured
from nextscale.research.analyze.study import Study
from nextscale.research.calibrate.sparsevar import BLOCKS

SHARE = 0.5  # of the cells of every sparse scale


def measure(study: Study) -> Data:
    """The quality with each of some blocks, evenly spread, and with random cells; maps of the prompt of the page."""
    like, depth = study.setting(SparseVAR), study.pipe.backbone.depth
    count = min(BLOCKS, depth)
    blocks = [round(number * depth / count) for number in range(1, count + 1)]  # from 1, those of `calibrate`
    methods = [Exclude(SHARE, like=dataclasses.replace(like, block=block / depth)) for block in blocks]
    quality = []
    with bar("images", (count + 1) * len(study.images), study.pipe.progress_bar) as advance:
        for method in (*methods, Exclude(SHARE, "random", like)):
            quality.append(study.quality(method).rounded())
            advance(len(study.images))
    maps = [measured(study, method) for method in methods]
    return {
        **study.about(),
        "prompt": study.prompt,
        "seed": study.seed,
        "share": SHARE,
        "blocks": blocks,
        "depth": depth,
        "quality": quality[:-1],
        "random": quality[-1],
        "maps": [to_half(map_ / max(float(map_.max()), 1e-30)) for map_ in maps],
    }


def draw(data: Data, path: Path) -> None:
    rows = style.split_rows(range(len(data["blocks"])), 8)
    h, w = data["maps"][0].shape
    side = 9.2 / len(rows[0]) * h / w
    figure = style.new_figure(side + 4.4)
    upper, lower = figure.subfigures(2, 1, height_ratios=(side + 0.8, 3.6))
    best = int(np.argmax([point["ssim"] for point in data["quality"]]))

    def show(axes: Any, n: int) -> Any:
        map_ = data["maps"][n].astype(np.float32)
        return style.show_image(axes, map_, f"block {data['blocks'][n]}", vmin=0, vmax=1, cmap=style.CMAP)

    grid, mappable = style.show_grid(upper, rows, show)
    style.colorbar(upper, mappable, grid, "relative", aspect=14)
    style.set_title(upper, "What each block changes one scale before the first sparse one; dark leaves first", data)
    for axes, key, name in zip(
        lower.subplots(1, 2, gridspec_kw={"wspace": 0.06}), ("ssim", "psnr"), ("SSIM", "PSNR, dB,"), strict=True
    ):
        values = [point[key] for point in data["quality"]]
        colors = [style.ORANGE if n == best else style.BLUE for n in range(len(values))]
        axes.bar(range(len(values)), values, color=colors)
        axes.axhline(data["random"][key], color=style.BLACK, lw=1, ls="--", label="random cells")
        known = [*values, data["random"][key]]
        margin = max(0.15 * (max(known) - min(known)), 1e-3)
        axes.set_ylim(min(known) - margin, max(known) + margin)
        axes.set_xticks(range(len(values)), data["blocks"])
        axes.set(xlabel=f"block, of {data['depth']}", ylabel=f"{name} to the plain image")
        axes.legend(fontsize=9, frameon=False, loc="best")
        style.plain_axes(axes)
    images = len(data["prompts"])
    lower.suptitle(
        f"Quality with {data['share']:.0%} of the cells excluded, over {images} images; axes are cut", fontsize=10
    )
    style.save(figure, path)
