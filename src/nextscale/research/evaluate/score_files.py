"""The images of a folder, and their prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nextscale.errors import NextscaleError
from nextscale.io.reading import read_json, read_lines

SUFFIXES = (".png", ".jpg", ".jpeg")
PIXELS = 2**21  # in one batch: two images of 1024 x 1024


@dataclass(frozen=True)
class ImageFolder:
    root: Path
    sizes: dict[str, tuple[int, int]]  # path below root -> (width, height), in order

    def read(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Images of one size -> bytes [B, 3, H, W]."""
        arrays = []
        for name in names:
            try:
                with Image.open(self.root / name) as image:
                    arrays.append(np.asarray(image.convert("RGB")))
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # as PIL finds a damage
                raise _unreadable(self.root / name, error) from None
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).to(device)

    def batches(self) -> Iterator[list[str]]:
        """Neighbors of one size, a few at a time."""
        batch: list[str] = []
        for name, (width, height) in self.sizes.items():
            if batch and (self.sizes[batch[0]] != (width, height) or (len(batch) + 1) * width * height > PIXELS):
                yield batch
                batch = []
            batch.append(name)
        if batch:
            yield batch


def open_folder(path: Path) -> ImageFolder:
    """All images below a folder. Of what `nextscale export` wrote, its folder of images."""
    if not path.is_dir():
        raise NextscaleError(f"{path} is not a folder of images")
    root = path / "images" if any(path.glob("manifest*.json")) and (path / "images").is_dir() else path
    below = [p.relative_to(root) for p in root.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()]
    # What begins with a dot is not meant to be seen: an unfinished file, a thumbnail.
    names = sorted((p.as_posix() for p in below if not any(part[0] == "." for part in p.parts)), key=_in_order)
    if not names:
        raise NextscaleError(f"{root} holds no images ({', '.join(SUFFIXES)})")
    return ImageFolder(root, {name: _size(root / name) for name in names})


def require_pairs(folder: ImageFolder, reference: ImageFolder) -> None:
    """Every image has its counterpart, of one name and one size."""
    for has, lacks in ((folder, reference), (reference, folder)):
        missing = next((name for name in has.sizes if name not in lacks.sizes), None)
        if missing is not None:
            raise NextscaleError(f"images are compared by name, and {lacks.root} lacks {missing} of {has.root}")
    for name, (width, height) in folder.sizes.items():
        if reference.sizes[name] != (width, height):
            wide, high = reference.sizes[name]
            raise NextscaleError(f"{name} is {width} x {height} in {folder.root}, but {wide} x {high} in its reference")


def read_prompts(path: Path, folder: ImageFolder) -> dict[str, str]:
    """A JSON object {image: prompt}, or a text file with one prompt per line, in the order of the images."""
    if path.suffix.lower() != ".json":
        lines = [prompt for _, prompt in read_lines(path)]
        if len(lines) != len(folder.sizes):
            raise NextscaleError(f"{path} has {len(lines)} prompts for the {len(folder.sizes)} images of {folder.root}")
        return dict(zip(folder.sizes, lines, strict=True))
    content = read_json(path, "a JSON object of images and their prompts")
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise NextscaleError(f"{path} is not a JSON object of images and their prompts, both texts")
    missing = next((name for name in folder.sizes if name not in content), None)
    if missing is not None:
        raise NextscaleError(f"{path} has no prompt for {missing} of {folder.root}")
    return {name: content[name] for name in folder.sizes}


def _in_order(name: str) -> list[tuple[int, str]]:
    """9.png before 10.png: who numbers images and writes their prompts line by line means the numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)] + [(-2, name)]


def _size(path: Path) -> tuple[int, int]:
    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> NextscaleError:
    return NextscaleError(f"{path} is not a readable image: {str(error).splitlines()[0]}")
