"""The figure of a sweep: quality against cost, one line per method, one row of panels per kind of background."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from nextscale.io.writing import atomic_write
from nextscale.research.analyze.style import plain_axes, require_matplotlib
from nextscale.research.evaluate.report import Row
from nextscale.research.evaluate.statistics import ConfidenceInterval, pareto

# Okabe and Ito's colors, which most color-blind people can tell apart; marks help the others.
COLORS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B2A400")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LABELS = {
    "scenes": "scenes score",
    "psnr": "PSNR to the plain image, dB",
    "ssim": "SSIM to the plain image",
    "perceptual": "perceptual distance to the plain image",
    "seconds": "seconds per image",
    "flops": "FLOPs, share of the plain run",
    "tokens": "tokens computed, share of the plain run",
}


def draw_curves(
    rows: Sequence[Row], curves: dict[str, tuple[str, ...]], path: Path, cost: str, qualities: Sequence[str], title: str
) -> None:
    plt = require_matplotlib()
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    found = {(row.background, row.name): row for row in rows}
    backgrounds = list(dict.fromkeys(row.background for row in rows))
    size = 3.9 * len(qualities), 3.4 * len(backgrounds) + 0.8
    figure, panels = plt.subplots(
        len(backgrounds), len(qualities), figsize=size, layout="constrained", squeeze=False, sharex=True
    )
    for axes, (background, quality) in zip(panels.flat, itertools.product(backgrounds, qualities), strict=True):
        by_name = {name: found[background, name] for curve in curves.values() for name in curve}
        for n, (curve, names) in enumerate(curves.items()):
            points = sorted(
                (x, e.value, e.low, e.high)
                for name in names
                if isinstance(x := by_name[name].values[cost], float)
                and isinstance(e := by_name[name].values[quality], ConfidenceInterval)
            )
            if not points:
                continue
            at, y, low, high = zip(*points, strict=True)
            color, mark = COLORS[n % len(COLORS)], MARKERS[n % len(MARKERS)]
            again = n >= len(COLORS)  # the second round has dashes and open marks
            style = {"ls": "--" if again else "-", "mfc": "white" if again else color}
            axes.fill_between(at, low, high, color=color, alpha=0.12, lw=0)
            axes.plot(at, y, marker=mark, color=color, ms=5, lw=1.3, label=curve, **style)
        axes.set(ylabel=LABELS[quality], xscale="log")
        axes.set_title(f"{background} backgrounds", fontsize=9)
        if background == backgrounds[-1]:
            axes.set_xlabel(LABELS[cost])
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        ticks = [t for t in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if _inside(t, axes.get_xlim())]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        plain_axes(axes)
        axes.grid(alpha=0.25, lw=0.6)
        if quality == "perceptual":  # a ruined image is a hundred times as far as a good one
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.invert_yaxis()  # better is up, as in the other panels
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)
    plt.close(figure)


def _inside(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def best(rows: Sequence[Row], cost: str, quality: str) -> list[str]:
    """Name the Pareto set of rows of one kind."""
    sign = -1 if quality == "perceptual" else 1
    points = {}
    for row in rows:
        x, e = row.values[cost], row.values[quality]
        if isinstance(x, float) and isinstance(e, ConfidenceInterval):
            points[row.name] = (x, sign * e.value)
    return pareto(points)
