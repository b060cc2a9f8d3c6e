"""Letters and digits as white masks, in a font that comes with matplotlib.

    python -m training.textured.letters      # after python -m training.sprites, into the same folder

DejaVu Sans Bold: its license (Bitstream Vera's, with additions in the public domain) lets everybody use, copy, embed
and distribute the font; pictures of its letters are under no terms.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 384
SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def font_file() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"


def draw_letter(sign: str, font: ImageFont.FreeTypeFont, side: int = SIDE) -> Image.Image:
    """The letter as a mask, its longer side nine tenths of the picture's."""
    big = Image.new("L", (6 * side, 6 * side))
    ImageDraw.Draw(big).text((3 * side, 3 * side), sign, fill=255, font=font, anchor="mm")
    ink = np.asarray(big) > 0
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    cut = big.crop((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1))
    scale = 0.9 * side / max(cut.size)
    cut = cut.resize((round(cut.width * scale), round(cut.height * scale)), Image.Resampling.LANCZOS)
    mask = Image.new("L", (side, side))
    mask.paste(cut, ((side - cut.width) // 2, (side - cut.height) // 2))
    return mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "data" / "sprites")
    folder = parser.parse_args().out / "letters"
    folder.mkdir(parents=True, exist_ok=True)
    font = ImageFont.truetype(str(font_file()), 3 * SIDE)
    for sign in SIGNS:
        draw_letter(sign, font).save(folder / f"{sign}.webp", lossless=True)
    print(f"{len(SIGNS)} letters in {folder}")


if __name__ == "__main__":
    main()
