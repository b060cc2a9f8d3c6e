"""Decoded tensors as images, and images as files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nextscale.errors import NextscaleError, choices
from nextscale.io.arguments import read_list, short_repr
from nextscale.io.writing import atomic_write, require_folder, require_writable

if TYPE_CHECKING:
    from nextscale.engine.callback import ScaleEnd

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


def to_pil(images: Tensor) -> list[Image.Image]:
    """Convert [B, 3, H, W] in [-1, 1] to PIL images. Truncated, not rounded, as the official code does."""
    return [Image.fromarray(pixels) for pixels in to_bytes(as_output(images, "pt")).cpu().numpy()]


def to_bytes(images: Tensor) -> Tensor:
    """Convert [B, 3, H, W] in [0, 1] to the pixels of PIL images, [B, H, W, 3] of uint8."""
    return images.mul(255).clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()


def from_pil(images: Image.Image | Sequence[Image.Image]) -> Tensor:
    """Convert PIL images to [B, 3, H, W] in [-1, 1]."""
    allowed = "a PIL image or a list of them"
    pil_images = [images] if isinstance(images, Image.Image) else read_list(images, "images", allowed)
    for image in pil_images:
        if not isinstance(image, Image.Image):
            raise NextscaleError(f"images must be {allowed}, not {short_repr(image)}")
    if not pil_images:
        raise NextscaleError("no image was given")
    arrays = [np.asarray(p.convert("RGB"), dtype=np.float32) for p in pil_images]
    if len({a.shape for a in arrays}) != 1:
        raise NextscaleError("the images must have one size")
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).div(127.5).sub(1)


def as_output(images: Tensor, output_type: str) -> Any:
    """Convert by diffusers' conventions: "pt" [B, 3, H, W] and "np" [B, H, W, 3] lie in [0, 1]."""
    if output_type == "pil":
        return to_pil(images)
    unit = images.float().add(1).div(2)
    return unit.permute(0, 2, 3, 1).cpu().numpy() if output_type == "np" else unit


def image_paths(out: str | Path, count: int) -> list[Path]:
    """Name FILE for one image, FILE-0, FILE-1, ... for several; checked before anything is computed."""
    path = Path(out)
    known = Image.registered_extensions()
    try:
        # Some formats know neither colors nor how to be written here: a small image finds out.
        Image.new("RGB", (16, 16)).save(io.BytesIO(), format=known[path.suffix.lower()])
    except Exception:
        endings = choices((".png", ".jpg", ".webp"))
        raise NextscaleError(f"cannot write {path.name!r}; allowed endings: {endings}, ...") from None
    paths = [path] if count == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(count)]
    for each in paths:
        require_writable(each)
    return paths


class Previews:
    """A callback of the pipeline: after every scale, what its images look like so far, FOLDER/scale-01.png, ..."""

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.written = Path(folder), list[Path]()
        require_folder(self.folder)

    def __call__(self, end: ScaleEnd) -> None:
        pil_images = to_pil(end.decode())
        paths = image_paths(self.folder / f"scale-{end.scale.index + 1:02}.png", len(pil_images))
        save_all(pil_images, paths)
        self.written += paths


def save_all(images: Sequence[Image.Image], paths: Sequence[Path]) -> None:
    for image, path in zip(images, paths, strict=True):
        with atomic_write(path) as file:
            image.save(file, format=Image.registered_extensions()[path.suffix.lower()])
