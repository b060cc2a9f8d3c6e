"""Which frequencies the picture has after every scale (NOVA, Figure 4a)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nextscale.research.analyze.data import Data, small
from nextscale.research.analyze.style import MAPS, canvas, entitle, gradient, picture, plain_axes, rows_of, save
from nextscale.research.analyze.watch import Watched

MOST = 7  # spectra side by side
SIDE = 128  # of a stored spectrum


def measure(watched: Watched) -> Data:
    """Amplitudes of the decoded picture's grey values, as a map (log10, center = 0) and as means over circles."""
    amplitudes = [_amplitude(image) for image in watched.full]
    return {
        **watched.about(),
        "unit": "log10 of the amplitude of grey values in 0..1; radius 1 = half a cycle per pixel",
        "spectra": [small(_shrunk(np.log10(a + 1e-3))) for a in amplitudes],
        "radial": [[round(float(v), 4) for v in _radial(a)] for a in amplitudes],
    }


def _amplitude(image: Image.Image) -> np.ndarray:
    grey = np.asarray(image.convert("L"), dtype=np.float64) / 255
    return np.abs(np.fft.fftshift(np.fft.fft2(grey - grey.mean())))


def _shrunk(map_: np.ndarray) -> np.ndarray:
    """Means over blocks, so that the map has at most SIDE cells per side."""
    step = max(1, -(-max(map_.shape) // SIDE))
    h, w = (n // step * step for n in map_.shape)
    return map_[:h, :w].reshape(h // step, step, w // step, step).mean((1, 3))


def _radial(amplitude: np.ndarray, bins: int = 48) -> np.ndarray:
    """log10 of the mean amplitude by distance from the center, up to half a cycle per pixel."""
    h, w = amplitude.shape
    y, x = (np.arange(h) - h // 2) / (h / 2), (np.arange(w) - w // 2) / (w / 2)
    radius = np.hypot(y[:, None], x)
    bins = min(bins, max(min(h, w) // 4, 1))
    which = np.minimum((radius * bins).astype(int), bins)  # the corners beyond radius 1 are left out
    total = np.bincount(which.ravel(), amplitude.ravel(), bins + 1)[:bins]
    return np.log10(total / np.maximum(np.bincount(which.ravel(), minlength=bins + 1)[:bins], 1) + 1e-3)


def draw(data: Data, path: Path) -> None:
    spectra = [s.astype(np.float32) for s in data["spectra"]]
    low, high = float(np.quantile(spectra[-1], 0.02)), float(np.quantile(spectra[-1], 0.998))
    rows = rows_of(range(len(spectra)), MOST)
    columns = len(rows[0])
    side = 9.2 / columns * spectra[0].shape[0] / spectra[0].shape[1]
    tall = len(rows) * (side + 0.3)
    figure = canvas(0.6 + tall + 3.4)
    upper, lower = figure.subfigures(2, 1, height_ratios=(tall, 3.4))
    grid = upper.subplots(len(rows), columns, squeeze=False)
    shown = None
    for axes in grid.flat:
        axes.axis("off")
    for line, group in zip(grid, rows, strict=True):
        for axes, scale in zip(line, group, strict=False):
            shown = picture(axes, spectra[scale], f"scale {scale + 1}", vmin=low, vmax=max(high, low + 1e-3), cmap=MAPS)
    bar = upper.colorbar(shown, ax=grid, location="right", aspect=30, pad=0.01)
    bar.set_label("log10 amplitude", fontsize=9)
    bar.ax.tick_params(labelsize=9)
    entitle(upper, "Spectrum of the picture after every scale", data)
    _curves(lower.subplots(), data)
    save(figure, path)


def _curves(axes: Any, data: Data) -> None:
    for scale, (curve, color) in enumerate(zip(data["radial"], gradient(len(data["radial"])), strict=True), start=1):
        h, w = data["grids"][scale - 1]
        axes.plot((np.arange(len(curve)) + 0.5) / len(curve), curve, color=color, lw=1.6, label=f"{scale} ({h}×{w})")
    axes.set(xlabel="frequency (1 = half a cycle per pixel)", ylabel="log10 of the mean amplitude", xlim=(0, 1))
    axes.legend(
        title="after scale", fontsize=8.5, title_fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    plain_axes(axes)
