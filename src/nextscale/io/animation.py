"""An animation of one image: its scales one after the other, with the cells that were computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from nextscale.errors import NextscaleError, choices, readable, shortened
from nextscale.io.images import to_pil
from nextscale.io.writing import atomic_write, require_writable

if TYPE_CHECKING:
    from nextscale.engine.callback import ScaleEnd
    from nextscale.engine.output import Output

ENDINGS = (".webp", ".gif")
SIDE, MARGIN, GAP, HEAD, FOOT = 512, 20, 24, 44, 58  # pixels: of an image's longer side, around, between, above, below
GROUND, TEXT, QUIET, TRACK, BAR = (19, 22, 30), (238, 240, 244), (160, 167, 180), (52, 58, 72), (255, 184, 77)
SHADE, SHADED = (12, 14, 22), 0.58  # what no layer computed becomes this color by this much
FIRST, LAST, FINISHED = 150, 800, 2200  # milliseconds: tiny scales pass fast, the finished image stays


@dataclass(frozen=True)
class Snapshot:
    """An image after one scale."""

    image: Image.Image
    computed: np.ndarray  # the share of layers that computed each cell, [h, w]
    tokens: float  # computed up to here, as a share of all that a plain run computes


@dataclass(frozen=True)
class Panel:
    """What one run shows: a snapshot per scale, then the finished image."""

    title: str
    snapshots: list[Snapshot]
    finished: Image.Image


@dataclass
class Film:
    """A callback of the pipeline that keeps the first image as it is after every scale."""

    images: dict[int, Image.Image] = field(default_factory=dict)

    def __call__(self, end: ScaleEnd) -> None:
        self.images[end.scale.index] = to_pil(end.decode()[:1])[0]

    def panel(self, title: str, output: Output) -> Panel:
        trace, finished = output.trace, output.images[0]
        counts = trace.to_dict()["images"][0]
        image, tokens, snapshots = Image.new("RGB", finished.size), 0, []
        for index, scale in enumerate(counts["scales"]):
            image = self.images.get(index, image)  # a scale that is left out changes nothing
            tokens += scale["rows"] * sum(layer["kept"] for layer in scale["layers"])
            snapshots.append(Snapshot(image, trace.computed(0, index + 1), tokens / counts["row_tokens_full"]))
        return Panel(title, snapshots, finished)


def animation_path(out: str | Path) -> Path:
    """Complain of a file that cannot be written before anything is computed."""
    path = Path(out)
    if path.suffix.lower() not in ENDINGS:
        raise NextscaleError(f"cannot write the animation {path.name!r}; allowed endings: {choices(ENDINGS)}")
    require_writable(path)
    return path


def save_animation(panels: Sequence[Panel], path: Path) -> None:
    """Write runs of one schedule side by side, scale by scale, in an endless loop."""
    sides = [max(snapshot.computed.shape) for snapshot in panels[0].snapshots]
    times = [*(FIRST + (LAST - FIRST) * side // sides[-1] for side in sides), FINISHED]
    frames = [*(_frame(panels, index) for index in range(len(sides))), _frame(panels, None)]
    options: dict[str, Any] = {"format": "WEBP", "quality": 90}
    if path.suffix.lower() == ".gif":
        frames, options = [_indexed(frame) for frame in frames], {"format": "GIF"}
    with atomic_write(path) as file:
        frames[0].save(file, save_all=True, append_images=frames[1:], duration=times, loop=0, **options)


def _frame(panels: Sequence[Panel], index: int | None) -> Image.Image:
    """Draw all runs as they are after a scale; None = finished."""
    width, height = panels[0].finished.size
    width, height = (max(round(n * SIDE / max(width, height)), 1) for n in (width, height))
    pitch = SIDE + GAP  # captions need their width below a standing image too
    frame = Image.new("RGB", (2 * MARGIN + len(panels) * pitch - GAP, HEAD + height + FOOT), GROUND)
    for place, panel in enumerate(panels):
        left = MARGIN + place * pitch
        snapshot = panel.snapshots[-1 if index is None else index]
        image = panel.finished if index is None else snapshot.image
        image = image.resize((width, height), Image.Resampling.LANCZOS)
        if index is None:
            below = "finished", f"{_percent(snapshot.tokens)} of the tokens of a plain run"
        else:
            h, w = snapshot.computed.shape
            below = f"scale {index + 1} of {len(panel.snapshots)}: {h}x{w} cells", _described(snapshot.computed)
            image = _shaded(image, snapshot.computed)
        frame.paste(image, (left + (SIDE - width) // 2, HEAD))
        _caption(ImageDraw.Draw(frame), left, HEAD + height, panel.title, snapshot.tokens, below)
    return frame


def _shaded(image: Image.Image, computed: np.ndarray) -> Image.Image:
    """Darken the cells that were not computed."""
    if not computed.any():
        return image  # a scale that is left out hides nothing
    shade = Image.fromarray((255 * SHADED * (1 - computed)).astype(np.uint8))
    dark = Image.new("RGB", image.size, SHADE)
    return Image.composite(dark, image, shade.resize(image.size, Image.Resampling.NEAREST))


def _described(computed: np.ndarray) -> str:
    if not computed.any():
        return "left out"
    return f"{_percent(computed.mean())} computed" + ("" if computed.min() == 1 else ", the rest darkened")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _caption(
    draw: ImageDraw.ImageDraw, left: int, bottom: int, title: str, tokens: float, below: tuple[str, str]
) -> None:
    right, large, small = left + SIDE, ImageFont.load_default(22), ImageFont.load_default(18)
    title = readable(title).encode("ascii", "replace").decode()  # PIL's font knows few other letters
    draw.text((left, HEAD // 2), shortened(title, 32), TEXT, large, anchor="lm")
    draw.text((right, HEAD // 2), f"tokens {_percent(tokens)}", BAR, large, anchor="rm")
    draw.rectangle((left, bottom + 8, right - 1, bottom + 13), TRACK)
    draw.rectangle((left, bottom + 8, left + round((SIDE - 1) * tokens), bottom + 13), BAR)
    draw.text((left, bottom + 36), below[0], TEXT, small, anchor="lm")
    draw.text((right, bottom + 36), below[1], QUIET, small, anchor="rm")


def _indexed(frame: Image.Image) -> Image.Image:
    """Reduce to 256 colors of the frame's own, dithered: a sky has more than that."""
    palette = frame.quantize(256, Image.Quantize.FASTOCTREE)
    return frame.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG)
