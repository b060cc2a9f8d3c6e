"""One image of several methods on one prompt: what each made, where it differs from plain, where it computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nextscale.methods.naming import PLAIN
from nextscale.research.analyze import style
from nextscale.research.analyze.computed import computed_overall
from nextscale.research.analyze.runs import MethodResult

MAX_COLUMNS = 4  # of methods
FACTORS = (16, 8, 4, 2, 1)  # by which differences may be amplified
OVERLAY = 0.6  # opacity


def draw_sheet(results: Sequence[MethodResult], prompt: str | int, path: Path) -> None:
    """Draw the results, of which the plain run is the first."""
    plain = results[0].output.images[0]
    differences = {m.name: difference(plain, m.output.images[0]) for m in results}
    factor = amplification(list(differences.values()))
    bands = style.split_rows(results, MAX_COLUMNS)
    columns = len(bands[0])
    h, w = results[0].output.trace.schedule.last
    side = 8.6 / columns * h / w  # inches of a panel's height
    figure = style.new_figure(0.75 + len(bands) * (3 * side + 0.9))
    grid = figure.subplots(3 * len(bands), columns, squeeze=False)
    for b, band in enumerate(bands):
        rows = grid[3 * b : 3 * b + 3]
        for axes in rows.flat:
            axes.axis("off")
        changes = shares = None
        for column, m in zip(rows.T, band, strict=False):
            for axes in column:
                axes.axis("on")
            style.show_image(column[0], m.output.images[0], title=headline(m))
            changes = style.show_image(
                column[1], factor * differences[m.name], likeness(m), vmin=0, vmax=1, cmap=style.DIFFERENCE_CMAP
            )
            shares = overlay(column[2], m)
        for axes, text in zip(rows[:, 0], ("image", "difference to plain", "computed tokens"), strict=True):
            axes.set_ylabel(text, fontsize=10)
        bar = figure.colorbar(changes, ax=list(rows[1]), ticks=[0, 1], aspect=12, pad=0.01)
        bar.ax.set_yticklabels(["0", f"≥ {_percent(1 / factor)}"], fontsize=9)
        bar = figure.colorbar(shares, ax=list(rows[2]), ticks=[0, 0.5, 1], aspect=12, pad=0.01)
        bar.ax.set_yticklabels(["0", "50 %", "100 %"], fontsize=9)
    figure.suptitle(style.escape_dollars(f"{style.quoted(prompt)}, seed {results[0].output.seeds[0]}"), fontsize=12)
    figure.supxlabel(
        f"difference: mean over the colors of |method − plain|, amplified {factor} times; "
        "computed: share of layers and scales\nin which a cell was computed, scales weighted by their tokens, "
        "over the image in grey",
        fontsize=9,
    )
    style.save(figure, path)


def headline(m: MethodResult) -> str:
    if m.name == PLAIN:
        return f"plain (none)\n{m.seconds:.1f} s, all tokens"
    return f"{style.escape_dollars(m.name)}\n{m.seconds:.1f} s, {m.ratio:.2f}×, {100 * m.share:.0f} % of tokens"


def likeness(m: MethodResult) -> str:
    if m.name == PLAIN:
        return "(reference)"
    return "the same image" if m.same else f"PSNR {m.psnr:.1f} dB, SSIM {m.ssim:.3f}"


def difference(a: Image.Image, b: Image.Image) -> np.ndarray:
    """|a - b| in 0..1, the mean over the colors, [H, W]."""
    x, y = (np.asarray(p.convert("RGB"), dtype=np.float32) / 255 for p in (a, b))
    return np.abs(x - y).mean(-1)


def amplification(differences: Sequence[np.ndarray]) -> int:
    """The largest factor with which nearly all of every map stays below 1."""
    high = max(float(np.quantile(d, 0.995)) for d in differences)
    return next((f for f in FACTORS if f * high <= 1), 1)


def overlay(axes: Any, m: MethodResult) -> Any:
    """Draw the share of layers that computed each cell over the image in grey; return the mappable."""
    image = m.output.images[0]
    axes.imshow(image.convert("L"), cmap="gray", vmin=0, vmax=255)
    extent = (-0.5, image.width - 0.5, image.height - 0.5, -0.5)
    shares = computed_overall(m.output.trace)
    return style.show_image(axes, shares, vmin=0, vmax=1, cmap=style.CMAP, alpha=OVERLAY, extent=extent)


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
