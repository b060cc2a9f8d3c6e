"""How every image of this package looks: size, colors that color-blind readers can tell apart, saving."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nextscale.errors import NextscaleError, readable
from nextscale.io.images import save_all

WIDTH = 10.0  # inches; with DPI below, letters stay readable when a page shows the image 900 pixels wide
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
CMAP = "viridis"  # for values on a grid
DIFFERENCE_CMAP = "magma"  # for differences: nothing is black


def require_matplotlib() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise NextscaleError("drawing needs matplotlib: pip install 'nextscale[plot]'") from None
    pyplot.switch_backend("agg")
    return pyplot


def new_figure(height: float) -> Any:
    """An empty figure of the common width."""
    return require_matplotlib().figure(figsize=(WIDTH, height), facecolor="white", layout="constrained")


def save(figure: Any, path: Path, dpi: int = DPI) -> None:
    """Write the figure in any format that images may have: matplotlib draws, Pillow writes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    require_matplotlib().close(figure)
    save_all([Image.open(drawn).convert("RGB")], [path])


def show_image(axes: Any, image: Any, title: str = "", **options: Any) -> Any:
    """Draw an image or a map without ticks; return the mappable."""
    mappable = axes.imshow(image, interpolation="nearest" if np.ndim(image) == 2 else None, **options)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    if title:
        axes.set_title(title, fontsize=9)
    return mappable


def show_grid(figure: Any, rows: Sequence[Sequence[Any]], show: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Give every item of equally long rows axes of its own to `show` it on; return all axes and the last mappable."""
    grid, mappable = figure.subplots(len(rows), len(rows[0]), squeeze=False), None
    for axes in grid.flat:
        axes.axis("off")
    for line, items in zip(grid, rows, strict=True):
        for axes, item in zip(line, items, strict=False):
            mappable = show(axes, item)
    return grid, mappable


def colorbar(figure: Any, mappable: Any, axes: Any, label: str = "", aspect: int = 30) -> None:
    bar = figure.colorbar(mappable, ax=axes, location="right", aspect=aspect, pad=0.01)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=9)


def plain_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def gradient(count: int) -> list[Any]:
    """Colors from dark to light, for an order such as that of the scales; never as light as paper."""
    from matplotlib import colormaps

    return [colormaps[CMAP](share) for share in np.linspace(0, 0.88, count)]


def quoted(prompt: object, max_length: int = 80) -> str:
    """A prompt as a title shows it: class numbers bare, long texts cut."""
    text = readable(str(prompt))
    if isinstance(prompt, int):
        return f"class {prompt}"
    return f"“{text if len(text) <= max_length else text[: max_length - 1].rstrip() + '…'}”"


def side(h: int, w: int) -> str:
    """A grid as a tick shows it."""
    return str(h) if h == w else f"{h}×{w}"


def escape_dollars(text: str) -> str:
    """Escape what matplotlib would read as a formula: text between two dollars."""
    return text.replace("$", r"\$")


def set_title(figure: Any, text: str, data: dict[str, Any]) -> None:
    """Say above the figure what it shows, of which prompt and model."""
    figure.suptitle(
        escape_dollars(f"{text}\n{quoted(data['prompt'])}, seed {data['seed']}, {data['model']}"), fontsize=11
    )


def set_title_of_many(figure: Any, text: str, data: dict[str, Any]) -> None:
    """Say above the figure what it shows, over how many images of which model."""
    images, prompts = len(data["prompts"]), len(set(data["prompts"]))
    of = quoted(data["prompts"][0]) if prompts == 1 else f"{prompts} prompts"
    figure.suptitle(
        escape_dollars(f"{text}\n{data['model']}, {images} {'image' if images == 1 else 'images'} of {of}"), fontsize=11
    )


def split_rows(items: Iterable[Any], max_columns: int) -> list[list[Any]]:
    """Split items into as few rows as possible, all about equally long."""
    items = list(items)
    rows = -(-len(items) // max_columns)
    columns = -(-len(items) // rows)
    return [items[i : i + columns] for i in range(0, len(items), columns)]
