"""How every picture of this package looks: size, colors that color-blind readers can tell apart, saving."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nextscale.errors import NextscaleError, readable
from nextscale.io.images import save_all

WIDTH = 10.0  # inches; with DPI below, letters stay readable when a page shows the picture 900 pixels wide
DPI = 120
# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
    "#000000",
)
MAPS = "viridis"  # for values on a grid
CHANGES = "magma"  # for differences: nothing is black


def require_matplotlib() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise NextscaleError("drawing needs matplotlib: pip install 'nextscale[plot]'") from None
    pyplot.switch_backend("agg")
    return pyplot


def canvas(height: float) -> Any:
    """An empty figure of the common width."""
    return require_matplotlib().figure(figsize=(WIDTH, height), facecolor="white", layout="constrained")


def save(figure: Any, path: Path, dpi: int = DPI) -> None:
    """In any format that pictures may have: matplotlib draws, Pillow writes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    require_matplotlib().close(figure)
    save_all([Image.open(drawn).convert("RGB")], [path])


def picture(axes: Any, image: Any, title: str = "", **options: Any) -> Any:
    """An image or a map without ticks."""
    shown = axes.imshow(image, interpolation="nearest" if np.ndim(image) == 2 else None, **options)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    if title:
        axes.set_title(title, fontsize=9)
    return shown


def plain_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def gradient(count: int) -> list[Any]:
    """Colors from dark to light, for an order such as that of the scales; never as light as paper."""
    from matplotlib import colormaps

    return [colormaps[MAPS](share) for share in np.linspace(0, 0.88, count)]


def quoted(prompt: object, most: int = 80) -> str:
    """A prompt as a title shows it: class numbers bare, long texts cut."""
    text = readable(str(prompt))
    if isinstance(prompt, int):
        return f"class {prompt}"
    return f"“{text if len(text) <= most else text[: most - 1].rstrip() + '…'}”"


def literal(text: str) -> str:
    """Text for matplotlib, which takes what stands between two dollars for a formula."""
    return text.replace("$", r"\$")


def entitle(figure: Any, text: str, data: dict[str, Any]) -> None:
    """What is shown, and of which prompt and model."""
    figure.suptitle(literal(f"{text}\n{quoted(data['prompt'])}, seed {data['seed']}, {data['model']}"), fontsize=11)


def rows_of(items: Iterable[Any], most: int) -> list[list[Any]]:
    """Items in as few rows as possible, all about equally long."""
    things = list(items)
    rows = -(-len(things) // most)
    columns = -(-len(things) // rows)
    return [things[i : i + columns] for i in range(0, len(things), columns)]
