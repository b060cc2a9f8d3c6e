"""Global and detail layers, told apart by the singular values of their attention entropy (ToProVAR, Figure 3)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from nextscale.methods.toprovar import ToProVAR
from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.watch import Watched

MAX_COLUMNS, MAX_MAPS = 6, 18
STORED_VALUES = 6  # singular values of a layer


def measure(watched: Watched, method: ToProVAR) -> Data:
    """Singular values of every layer's map of attention entropy at ToProVAR's representative scale."""
    assert watched.attention is not None
    maps = watched.attention.astype(np.float64)
    centered = maps - maps.mean((1, 2), keepdims=True) if method.center else maps
    values = np.linalg.svd(centered, compute_uv=False)
    second = values[:, 1] if values.shape[1] > 1 else np.zeros(len(values))
    return {
        **watched.about(),
        "scale": watched.attention_scale,
        "center": method.center,
        "beta": method.beta,
        "singular_values": values[:, :STORED_VALUES].round(5).tolist(),
        "ratios": (values[:, 0] / np.maximum(second, 1e-12)).round(5).tolist(),
        "maps": to_half(maps),
    }


def draw(data: Data, path: Path) -> None:
    maps, ratios = data["maps"].astype(np.float32), data["ratios"]
    # Eq. 4: R = exp(-beta (ratio - 1)); a layer is nearer to "global" where R < 1/2.
    border = 1 + math.log(2) / data["beta"] if data["beta"] else math.inf
    drawn = np.unique(np.linspace(0, len(maps) - 1, min(len(maps), MAX_MAPS)).round().astype(int))
    rows = style.split_rows(drawn, MAX_COLUMNS)
    h, w = maps.shape[1:]
    side = 9.0 / len(rows[0]) * h / w
    tall = len(rows) * (side + 0.45)
    figure = style.new_figure(0.6 + tall + 3.0)
    upper, lower = figure.subfigures(2, 1, height_ratios=(tall, 3.0))

    def show(axes: Any, j: int) -> None:
        kind = "global" if ratios[j] > border else "detail"
        low, high = float(maps[j].min()), max(float(maps[j].max()), float(maps[j].min()) + 1e-6)
        style.show_image(
            axes, maps[j], f"layer {j + 1}: {kind}\nratio {ratios[j]:.2f}", cmap=style.CMAP, vmin=low, vmax=high
        )

    style.show_grid(upper, rows, show)
    scale = f"scale {data['scale']} ({h}×{w})"
    style.set_title(upper, f"Attention entropy of every layer at {scale}; dark = low, each map on its own scale", data)
    _bars(lower.subplots(), ratios, border)
    style.save(figure, path)


def _bars(axes: Any, ratios: list[float], border: float) -> None:
    layers = range(1, len(ratios) + 1)
    for color, label, wanted in ((style.BLUE, "global: kept", True), (style.ORANGE, "detail: thinned", False)):
        some = [(j, r) for j, r in zip(layers, ratios, strict=True) if (r > border) == wanted]
        axes.bar([j for j, _ in some], [r for _, r in some], color=color, label=f"{label} ({len(some)})")
    if math.isfinite(border):
        axes.axhline(border, color="k", lw=1, ls="--")
        axes.text(len(ratios) + 0.6, border, f" R = ½\n at {border:.2f}", va="center", fontsize=9)
    axes.set_xticks(range(1, len(ratios) + 1, 1 + len(ratios) // 25))
    axes.set_xlim(0.3, len(ratios) + 0.7)
    axes.set(
        xlabel="layer",
        ylabel="first over second\nsingular value",
        ylim=(0, max(*ratios, border if math.isfinite(border) else 0) * 1.25),
    )
    axes.legend(fontsize=9, frameon=False, loc="upper right", ncols=2)
    style.plain_axes(axes)
