"""Which frequencies the token maps have at every scale (NOVA, Figure 4a)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.spectra import shrunk
from nextscale.research.analyze.watch import Watched

MAX_COLUMNS = 7
FLOOR = 1e-3  # of an amplitude, for its logarithm
KINDS = {"features": "the sum of all codes so far", "codes": "the codes of the scale alone"}


def measure(watched: Watched) -> Data:
    """Spectra of the maps that the codes of all scales so far add up to, and of each scale's own codes."""
    data: Data = {
        **watched.about(),
        "unit": "root of the mean square over channels of the orthonormal Fourier transform: white codes are flat",
    }
    for kind in KINDS:
        amplitudes = [amplitude(map_) for map_ in getattr(watched, kind)]
        data[kind] = [to_half(shrunk(np.log10(a + FLOOR))) for a in amplitudes]
        data[f"{kind}_radial"] = [[round(float(v), 5) for v in radial(a)] for a in amplitudes]
    return data


def amplitude(map_: np.ndarray) -> np.ndarray:
    """[d, h, w] -> [h, w], frequency 0 in the center."""
    found = np.fft.fft2(map_.astype(np.float64), norm="ortho")
    return np.fft.fftshift(np.sqrt(np.square(np.abs(found)).mean(0)))


def radial(amplitude: np.ndarray) -> np.ndarray:
    """The mean amplitude at 1, 2, ... cycles per side, up to half a cycle per cell of the shorter side."""
    h, w = amplitude.shape
    ring = np.hypot((np.arange(h) - h // 2)[:, None], np.arange(w) - w // 2).round().astype(int)
    total = np.bincount(ring.ravel(), amplitude.ravel())
    return (total / np.bincount(ring.ravel()))[1 : min(h, w) // 2 + 1]


def draw(data: Data, path: Path) -> None:
    rows = style.split_rows(range(len(data["grids"])), MAX_COLUMNS)
    h, w = data["features"][0].shape
    side = 9.2 / len(rows[0]) * h / w
    tall = len(rows) * (side + 0.3) + 0.35
    figure = style.new_figure(0.5 + 2 * tall + 3.4)
    *maps, lower = figure.subfigures(3, 1, height_ratios=(tall, tall, 3.4))
    for part, (kind, text) in zip(maps, KINDS.items(), strict=True):
        _maps(part, [m.astype(np.float32) for m in data[kind]], rows, f"Spectra of {text}")
    panels = lower.subplots(1, 2, sharex=True)
    for axes, (kind, text) in zip(panels, KINDS.items(), strict=True):
        _curves(axes, data, kind, text)
    handles, labels = panels[0].get_legend_handles_labels()
    lower.legend(handles, labels, title="scale", fontsize=8.5, frameon=False, loc="outside right center")
    figure.suptitle(
        style.escape_dollars(
            f"Frequencies of the token maps: {style.quoted(data['prompt'])}, seed {data['seed']}, {data['model']}"
        ),
        fontsize=11,
    )
    style.save(figure, path)


def _maps(figure: Any, maps: list[np.ndarray], rows: list[list[int]], title: str) -> None:
    values = np.concatenate([m.ravel() for m in maps[len(maps) // 2 :]])
    low, high = float(np.quantile(values, 0.02)), float(np.quantile(values, 0.998))

    def show(axes: Any, scale: int) -> Any:
        return style.show_image(
            axes, maps[scale], f"scale {scale + 1}", vmin=low, vmax=max(high, low + 1e-3), cmap=style.CMAP
        )

    grid, mappable = style.show_grid(figure, rows, show)
    style.colorbar(figure, mappable, grid, "log10 amplitude")
    figure.suptitle(title, fontsize=10)


def _curves(axes: Any, data: Data, kind: str, text: str) -> None:
    curves = data[f"{kind}_radial"]
    for (h, w), curve, color in zip(data["grids"], curves, style.gradient(len(curves)), strict=True):
        axes.plot(range(1, len(curve) + 1), curve, color=color, lw=1.6, label=f"{h}×{w}")
    axes.set(xlabel="frequency, cycles per side", xscale="log", yscale="log")
    for each in (axes.xaxis, axes.yaxis):
        each.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if kind == "codes" else "")
    axes.tick_params(which="both", labelsize=9)
    axes.set_title(text, fontsize=10)
    axes.set_ylabel("mean amplitude")
    axes.grid(color="0.92")
    style.plain_axes(axes)
