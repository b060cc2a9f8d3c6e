"""A sheet to look at: every place with three seeds, every material on shapes and, where sprites are, on icons.

python -m training.textured.sheet --out sheet.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from training.common import sheet
from training.painter import draw_shape, premultiplied
from training.textured.materials import MATERIALS, draw_material, dress
from training.textured.places import PLACES, draw_place

SHAPES = ("star", "heart", "ring")
ICONS = ("fox", "key", "cup", "rocket", "owl", "car")
TINTS = ((0.87, 0.16, 0.16), (0.18, 0.41, 0.88), (0.2, 0.65, 0.28))


def picture(image: Tensor) -> Image.Image:
    return Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy())


def sprites(folder: Path, side: int) -> list[Tensor]:
    """White shapes, then the icons that are in the folder: premultiplied RGBA in 0..1."""
    drawn = [draw_shape(name, side) for name in SHAPES]
    paths = [folder / f"{name}.webp" for name in ICONS]
    drawn += [np.asarray(Image.open(p).convert("RGBA").resize((side, side))) for p in paths if p.is_file()]
    return [torch.from_numpy(premultiplied(d)).permute(2, 0, 1).float().div(255) for d in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="image file to write")
    parser.add_argument("--sprites", type=Path, default=Path("training/data/sprites/glossy"), help="folder of icons")
    parser.add_argument("--side", type=int, default=512, help="pixels of a drawn place's side")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    images: list[Image.Image] = []
    titles: list[str] = []
    for name in PLACES:
        for seed in range(options.seed, options.seed + 3):
            generator = torch.Generator().manual_seed(seed)
            images.append(picture(draw_place(name, 1, options.side, options.side, generator)[0]))
            titles.append(f"{name}, seed {seed}")
    things = torch.stack(sprites(options.sprites, options.side * 3 // 4))
    light = torch.tensor([[-0.6, -0.8]]).expand(len(things), -1)
    for name in MATERIALS:
        for dye in (False, True):
            generator = torch.Generator().manual_seed(options.seed + dye)
            material = draw_material(name, len(things), things.shape[-1], generator)
            tints = torch.tensor([TINTS[i % 3] for i in range(len(things))]) if dye else None
            dressed = dress(things, material, name, light, tints)
            for thing in dressed:
                images.append(picture(thing[:3] + 0.93 * (1 - thing[3:])))
                titles.append(f"{name}, dyed" if dye else name)
    sheet(images, titles, 9, 192).save(options.out)
    print(f"{len(images)} pictures in {options.out}")


if __name__ == "__main__":
    main()
