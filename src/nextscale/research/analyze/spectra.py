"""Which frequencies the image has after every scale (NOVA, Figure 4a)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data, to_half
from nextscale.research.analyze.watch import Watched

MAX_COLUMNS = 7  # of spectra
SIDE = 128  # of a stored spectrum


def measure(watched: Watched) -> Data:
    """Amplitudes of the decoded image's grey values, as a map (log10, center = 0) and as means over circles."""
    amplitudes = [_amplitude(image) for image in watched.images]
    return {
        **watched.about(),
        "unit": "log10 of the amplitude of grey values in 0..1; radius 1 = half a cycle per pixel",
        "spectra": [to_half(shrunk(np.log10(a + 1e-3))) for a in amplitudes],
        "radial": [[round(float(v), 4) for v in _radial(a)] for a in amplitudes],
    }


def _amplitude(image: Image.Image) -> np.ndarray:
    grey = np.asarray(image.convert("L"), dtype=np.float64) / 255
    return np.abs(np.fft.fftshift(np.fft.fft2(grey - grey.mean())))


def shrunk(map_: np.ndarray) -> np.ndarray:
    """Average over blocks, so that the map has at most SIDE cells per side."""
    step = max(1, -(-max(map_.shape) // SIDE))
    h, w = (n // step * step for n in map_.shape)
    return map_[:h, :w].reshape(h // step, step, w // step, step).mean((1, 3))


def _radial(amplitude: np.ndarray, bins: int = 48) -> np.ndarray:
    """log10 of the mean amplitude by distance from the center, up to half a cycle per pixel."""
    h, w = amplitude.shape
    y, x = (np.arange(h) - h // 2) / (h / 2), (np.arange(w) - w // 2) / (w / 2)
    radius = np.hypot(y[:, None], x)
    bins = min(bins, max(min(h, w) // 4, 1))
    ring = np.minimum((radius * bins).astype(int), bins)  # the corners beyond radius 1 are left out
    total = np.bincount(ring.ravel(), amplitude.ravel(), bins + 1)[:bins]
    return np.log10(total / np.maximum(np.bincount(ring.ravel(), minlength=bins + 1)[:bins], 1) + 1e-3)


def draw(data: Data, path: Path) -> None:
    spectra = [s.astype(np.float32) for s in data["spectra"]]
    low, high = float(np.quantile(spectra[-1], 0.02)), float(np.quantile(spectra[-1], 0.998))
    rows = style.split_rows(range(len(spectra)), MAX_COLUMNS)
    side = 9.2 / len(rows[0]) * spectra[0].shape[0] / spectra[0].shape[1]
    tall = len(rows) * (side + 0.3)
    figure = style.new_figure(0.6 + tall + 3.4)
    upper, lower = figure.subfigures(2, 1, height_ratios=(tall, 3.4))

    def show(axes: Any, scale: int) -> Any:
        return style.show_image(
            axes, spectra[scale], f"scale {scale + 1}", vmin=low, vmax=max(high, low + 1e-3), cmap=style.CMAP
        )

    grid, mappable = style.show_grid(upper, rows, show)
    style.colorbar(upper, mappable, grid, "log10 amplitude")
    style.set_title(upper, "Spectrum of the image after every scale", data)
    _curves(lower.subplots(), data)
    style.save(figure, path)


def _curves(axes: Any, data: Data) -> None:
    for scale, (curve, color) in enumerate(
        zip(data["radial"], style.gradient(len(data["radial"])), strict=True), start=1
    ):
        h, w = data["grids"][scale - 1]
        axes.plot((np.arange(len(curve)) + 0.5) / len(curve), curve, color=color, lw=1.6, label=f"{scale} ({h}×{w})")
    axes.set(xlabel="frequency (1 = half a cycle per pixel)", ylabel="log10 of the mean amplitude", xlim=(0, 1))
    axes.legend(
        title="after scale", fontsize=8.5, title_fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    style.plain_axes(axes)
