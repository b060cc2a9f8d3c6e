"""How near the image after each scale is to the final one, per category of prompts (ToProVAR, Figure 3c)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nextscale.engine.callback import ScaleEnd
from nextscale.io.progress import bar
from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.study import Study
from nextscale.research.evaluate.ssim import ssim

COLORS = (style.BLUE, style.RED, style.GREEN, style.PINK, style.ORANGE, style.SKY, style.BLACK)


def measure(study: Study) -> Data:
    """SSIM of the image decoded after each scale to the final one, of every image."""
    alike: list[list[float]] = []
    with bar("images", len(study.images), study.pipe.progress_bar) as advance:
        for call in study.calls():
            decoded: list[torch.Tensor] = []

            def after(end: ScaleEnd, decoded: list[torch.Tensor] = decoded) -> None:
                decoded.append(end.decode().cpu())

            study.pipe(**call, callback_on_scale_end=after, output_type="latent")
            per_scale = torch.stack([ssim(image, decoded[-1]) for image in decoded], dim=1)
            alike += per_scale.tolist()
            advance(len(per_scale))
    return {
        **study.about(),
        "categories": [p.category for p, _ in study.images],
        "ssim": [[round(value, 5) for value in row] for row in alike],
    }


def draw(data: Data, path: Path) -> None:
    figure = style.new_figure(4.2)
    axes = figure.subplots()
    values, categories = np.array(data["ssim"]), np.array(data["categories"])
    scales = range(1, values.shape[1] + 1)
    for n, name in enumerate(dict.fromkeys(data["categories"])):
        _curve(axes, scales, values[categories == name], name, COLORS[n % len(COLORS)])
    axes.set_xticks(scales, [f"{t}\n{h}×{w}" for t, (h, w) in enumerate(data["grids"], start=1)])
    axes.tick_params(labelsize=9)
    axes.set(xlabel="after scale", ylabel="SSIM to the final image")
    axes.grid(color="0.92")
    axes.legend(fontsize=9, frameon=False, loc="lower right")
    style.plain_axes(axes)
    style.set_title_of_many(figure, "When an image is complete, per category of prompts", data)
    style.save(figure, path)


def _curve(axes: Any, scales: range, some: np.ndarray, name: str, color: str) -> None:
    if len(some) > 1:
        low, high = np.quantile(some, (0.1, 0.9), axis=0)
        axes.fill_between(scales, low, high, color=color, alpha=0.15, lw=0)
    label = style.escape_dollars(f"{name} ({len(some)})")
    axes.plot(scales, some.mean(0), "o-", color=color, ms=4, label=label)
