"""A sheet of random training scenes with their captions, to be looked at before anything is trained on them.

python -m training.textured.preview --out sheet.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from nextscale.io.images import to_pil
from nextscale.text.words import Lexicon
from training.common import HERE, sheet
from training.textured.painter import Painter, load_sprites
from training.textured.scenes import TASKS, Scenes, batch_of, read_vocabulary, words_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("sheet.png"))
    parser.add_argument("--sprites", type=Path, default=HERE / "data" / "sprites")
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ratio", type=float, default=1.0, help="height / width")
    parser.add_argument("--task", choices=TASKS, help="only scenes of this one")
    parser.add_argument("--side", type=int, default=224, help="pixels of a picture on the sheet")
    parser.add_argument("--same", action="store_true", help="eight pictures of each caption")
    options = parser.parse_args()
    vocabulary = read_vocabulary()
    maker, rng = Scenes(vocabulary), np.random.default_rng(options.seed)
    scenes = [maker.draw(rng, options.task, options.ratio) for _ in range(options.count)]
    if options.same:
        scenes = [maker.arranged(rng, scenes[i // 8]) for i in range(options.count)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    painter = Painter(load_sprites(options.sprites, vocabulary), device, variants=4, seed=options.seed)
    lexicon, images = Lexicon(words_of(vocabulary)), list[Image.Image]()
    for i in range(0, len(scenes), 8):
        images += to_pil(painter.paint(batch_of(scenes[i : i + 8], vocabulary, lexicon)))
    titles = [scene.caption for scene in scenes]
    sheet(images, titles, 8, options.side).save(options.out)


if __name__ == "__main__":
    main()
