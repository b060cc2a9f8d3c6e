"""Where Taper spends its budget: the cells that it keeps of every scale, and what they cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nextscale.io.progress import bar
from nextscale.methods import Method, Taper
from nextscale.methods.compose import Compose
from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.study import Study

BUDGETS = (0.12, 0.25, 0.4)  # of the curves, unless methods are asked for
COLORS = (style.BLUE, style.RED, style.GREEN, style.PINK, style.ORANGE)
MARKERS = "osD^v"


def measure(study: Study) -> Data:
    """Of every scale the share of cells kept, its extremes, the share planned, and the FLOPs, over all images."""
    methods = {name: m for name, m in (study.methods or {}).items() if m is not None and has_taper(m)}
    methods = methods or {f"taper:{budget:g}": Taper(budget=budget) for budget in BUDGETS}
    found, plain = {}, []
    with bar("images", len(methods) * len(study.images), study.pipe.progress_bar) as advance:
        for name, method in methods.items():
            shares, flops, planned = [], [], [1.0]
            for call in study.calls():
                trace = study.pipe(**call, method=method, output_type="latent").trace
                for image in range(len(trace.images)):
                    scales, whole = trace.image(image)["scales"], trace.plain_flops(image)
                    shares.append([np.mean([layer["kept"] for layer in e["layers"] or [{"kept": 0}]]) for e in scales])
                    shares[-1] = [kept / e["tokens"] for kept, e in zip(shares[-1], scales, strict=True)]
                    flops.append([spent / sum(whole) for spent in trace.flops(image)])
                    plain.append([spent / sum(whole) for spent in whole])
                    planned = [e.get("share", 1.0) for e in scales]
                    advance(1)
            found[name] = {
                "planned": planned,
                "kept": _rounded(np.mean(shares, axis=0)),
                "least": _rounded(np.min(shares, axis=0)),
                "most": _rounded(np.max(shares, axis=0)),
                "flops": _rounded(np.mean(flops, axis=0)),
            }
    return {**study.about(), "plain": _rounded(np.mean(plain, axis=0)), "methods": found}


def has_taper(method: Method) -> bool:
    return any(isinstance(part, Taper) for part in (method.parts if isinstance(method, Compose) else (method,)))


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 6) for value in values]


def draw(data: Data, path: Path) -> None:
    figure = style.new_figure(4.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.06})
    scales = range(1, len(data["grids"]) + 1)
    right.bar(scales, data["plain"], color="0.88", label="plain run")
    for n, (name, found) in enumerate(data["methods"].items()):
        color, mark = COLORS[n % len(COLORS)], MARKERS[n % len(MARKERS)]
        label = f"{style.escape_dollars(name)}, {sum(found['flops']):.1%} of the FLOPs"
        left.fill_between(scales, found["least"], found["most"], color=color, alpha=0.15, lw=0)
        left.plot(scales, found["planned"], ":", color=color, lw=1)
        left.plot(scales, found["kept"], f"{mark}-", color=color, ms=5, lw=1.5, label=label)
        right.plot(scales, found["flops"], f"{mark}-", color=color, ms=5, lw=1.5)
    left.set(ylabel="share of cells kept (dotted: planned; band: all images)", ylim=(-0.03, 1.05))
    right.set(ylabel="share of the plain run's FLOPs")
    for axes in (left, right):
        axes.set_xticks(scales, [f"{t}\n{style.side(*grid)}" for t, grid in zip(scales, data["grids"], strict=True)])
        axes.set_xlabel("scale (tokens per side below)")
        axes.tick_params(labelsize=8)
        axes.grid(color="0.92")
        style.plain_axes(axes)
    right.legend(fontsize=9, frameon=False, loc="upper left")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, fontsize=9, frameon=False, loc="outside lower center", ncols=3)
    style.set_title_of_many(figure, "Where the budget goes", data)
    style.save(figure, path)
