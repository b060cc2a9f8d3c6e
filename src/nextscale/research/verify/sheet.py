"""The images of a verified case: one row per image, one column per scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from nextscale.io.images import to_pil

if TYPE_CHECKING:
    from nextscale.research.verify import Verification

CELL, GAP, HEAD = 128, 6, 18


def sheet(report: Verification) -> Image.Image:
    """Draw the decoded map after every scale; random weights make random images, but the same as the official ones."""
    rows = [
        (f"{run} {i}", [to_pil(after[i : i + 1])[0] for after in scales])
        for run, scales in report.pictures.items()
        for i in range(len(scales[0]))
    ]
    columns = max(len(images) for _, images in rows)
    w, h = rows[0][1][0].size
    height = round(CELL * h / w)
    page = Image.new("RGB", (columns * (CELL + GAP) + GAP, HEAD + len(rows) * (height + HEAD + GAP)), "white")
    draw = ImageDraw.Draw(page)
    draw.text(
        (GAP, 2),
        "Decoded after each scale, first to last. Recorded cases have random weights: noise, but the official noise.",
        fill="black",
    )
    for y, (title, images) in enumerate(rows):
        top = HEAD + y * (height + HEAD + GAP)
        draw.text((GAP, top + 2), title, fill="black")
        for x, image in enumerate(images):
            big = image.resize((CELL, height), Image.Resampling.NEAREST)
            page.paste(big, (GAP + x * (CELL + GAP), top + HEAD))
    return page
