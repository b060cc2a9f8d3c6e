"""Quality against the share of tokens that was taken away: what several figures draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nextscale.io.progress import bar
from nextscale.methods.base import Method
from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.study import Study

COLORS = (style.BLUE, style.RED, style.GREEN, style.PINK, style.BLACK)
MARKERS = "osD^v"


def measure(study: Study, curves: Mapping[str, Callable[[float], Method]], shares: Sequence[float]) -> Data:
    """The mean quality of every curve's method at every share."""
    found: Data = {}
    with bar("images", len(curves) * len(shares) * len(study.images), study.pipe.progress_bar) as advance:
        for name, method in curves.items():
            found[name] = []
            for share in shares:
                found[name].append(study.quality(method(share)).rounded())
                advance(len(study.images))
    return {**study.about(), "shares": list(shares), "curves": found}


def draw(data: Data, path: Path, title: str, labels: dict[str, str], xlabel: str) -> None:
    figure = style.new_figure(4.4)
    draw_panels(figure, data, labels, xlabel)
    style.set_title_of_many(figure, title, data)
    style.save(figure, path)


def draw_panels(figure: Any, data: Data, labels: dict[str, str], xlabel: str) -> None:
    panels = figure.subplots(1, 2, gridspec_kw={"wspace": 0.06})
    for axes, key, unit in zip(panels, ("ssim", "psnr"), ("SSIM", "PSNR, dB,"), strict=True):
        for (name, points), color, mark in zip(data["curves"].items(), COLORS, MARKERS, strict=False):
            values, shares = [point[key] for point in points], data["shares"]
            if key == "ssim":  # where nothing is taken away the image is the plain one
                values, shares = [1.0, *values], [0.0, *shares]
            axes.plot(shares, values, f"{mark}-", color=color, ms=5, lw=1.5, label=labels[name])
        axes.set_xticks(shares, [f"{100 * share:.0f} %" for share in shares])
        axes.set(xlabel=xlabel, ylabel=f"{unit} to the plain image")
        axes.grid(color="0.92")
        style.plain_axes(axes)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=9, frameon=False, loc="outside lower center", ncols=2)
