"""One image of two runs: the images, where the second one computed, and the time of both."""

from __future__ import annotations

from pathlib import Path

from nextscale.engine.output import Output
from nextscale.io.images import from_pil
from nextscale.research.analyze import style
from nextscale.research.evaluate.psnr import psnr


def draw_comparison(plain: Output, fast: Output, prompt: str, path: Path) -> str:
    """Draw the image; return its figures as one sentence."""
    pyplot = style.require_matplotlib()
    seconds = [run.trace.seconds["total"] for run in (plain, fast)]
    share = fast.trace.share()
    a, b = from_pil(plain.images[:1]), from_pil(fast.images[:1])
    quality = "the same image" if a.equal(b) else f"PSNR against the plain image {float(psnr(a, b)):.1f} dB"
    name = fast.trace.header["method"]["name"]
    scales = len(fast.trace.schedule)  # columns of maps
    figure = pyplot.figure(figsize=(11, 7.6), facecolor="white")
    images = figure.add_gridspec(1, 2, left=0.02, right=0.98, top=0.88, bottom=0.22, wspace=0.02)
    maps = figure.add_gridspec(1, scales, left=0.02, right=0.98, top=0.16, bottom=0.05, wspace=0.08)
    ratio = seconds[0] / seconds[1]
    faster = f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"
    titles = (f"plain: {seconds[0]:.1f} s", f"{name}: {seconds[1]:.1f} s ({faster})")
    for run, title, cell in zip((plain, fast), titles, images, strict=True):
        axes = figure.add_subplot(cell)
        axes.imshow(run.images[0])
        axes.set_title(title, fontsize=13)
        axes.axis("off")
    for scale in fast.trace.schedule:
        axes = figure.add_subplot(maps[scale.index])
        kept = fast.trace.computed(0, scale.index + 1)
        axes.imshow(kept, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(f"{scale}\n{100 * kept.mean():.0f} %", fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.suptitle(style.escape_dollars(f"{style.quoted(prompt)}, seed {fast.seeds[0]}"), fontsize=14, y=0.98)
    figure.text(
        0.5,
        0.015,
        f"below: the cells of every scale that {name} computed (bright = in all layers, black = in none); "
        f"{100 * share:.0f} % of the tokens of the plain run",
        ha="center",
        fontsize=9,
    )
    style.save(figure, path, dpi=110)
    return (
        f"plain {seconds[0]:.2f} s, {name} {seconds[1]:.2f} s: {ratio:.2f}x faster, "
        f"{100 * share:.1f} % of the tokens, {quality}"
    )
