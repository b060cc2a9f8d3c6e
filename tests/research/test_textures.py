"""Procedural places and materials: in range, repeatable, different with the seed, and textured everywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `training` is not part of the package

from training.painter import draw_shape  # noqa: E402
from training.textured.materials import MATERIALS, draw_material, dress  # noqa: E402
from training.textured.places import PLACES, draw_place  # noqa: E402

FLOOR = 0.004  # of the standard deviation in a window: one of 255


def place(name: str, seed: int, count: int = 1, height: int = 64, width: int = 64) -> Tensor:
    return draw_place(name, count, height, width, torch.Generator().manual_seed(seed))


def material(name: str, seed: int, side: int = 96, count: int = 1) -> Tensor:
    return draw_material(name, count, side, torch.Generator().manual_seed(seed))


def energy(images: Tensor) -> Tensor:
    """The standard deviation of the fine detail in every 8 x 8 window: a gradient has none."""
    gray = images.mean(1, keepdim=True)
    fine = gray - F.avg_pool2d(F.pad(gray, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return F.avg_pool2d(fine * fine, 8).sqrt()


def check(images: Tensor, shape: tuple[int, ...]) -> None:
    assert images.shape == shape
    assert images.dtype == torch.float32
    assert torch.isfinite(images).all()
    assert images.min() >= 0
    assert images.max() <= 1


def test_a_gradient_has_no_texture() -> None:
    slope = torch.linspace(0, 1, 64)[None, None, :, None].expand(1, 3, 64, 64)
    assert (energy(slope) > FLOOR).float().mean() < 0.3


@pytest.mark.parametrize("name", PLACES)
def test_place_is_textured_and_follows_its_seed(name: str) -> None:
    first, second = place(name, 1, 2), place(name, 2, 2)
    check(first, (2, 3, 64, 64))
    assert torch.equal(first, place(name, 1, 2))
    assert (first - second).abs().mean() > 0.02
    assert (first[0] - first[1]).abs().mean() > 0.02
    assert (energy(first) > FLOOR).float().mean() > 0.75


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(("height", "width"), [(40, 80), (72, 48)])
def test_place_at_other_ratios(name: str, height: int, width: int) -> None:
    images = place(name, 3, 1, height, width)
    check(images, (1, 3, height, width))
    assert (energy(images) > FLOOR).float().mean() > 0.75


@pytest.mark.parametrize("name", MATERIALS)
def test_material_is_textured_and_follows_its_seed(name: str) -> None:
    first, second = material(name, 1, count=2), material(name, 2, count=2)
    check(first, (2, 3, 96, 96))
    assert torch.equal(first, material(name, 1, count=2))
    assert (first - second).abs().mean() > 0.02
    assert (first[0] - first[1]).abs().mean() > 0.02
    assert (energy(first) > FLOOR).float().mean() > 0.6


@pytest.fixture(scope="module")
def sprites() -> Tensor:
    """A white star, and a ring that is dark on its left."""
    star, ring = (torch.from_numpy(draw_shape(name, 96)).permute(2, 0, 1).float() / 255 for name in ("star", "ring"))
    ring[:3, :, :48] *= 0.3
    both = torch.stack((star, ring))
    both[:, :3] *= both[:, 3:]
    return both


@pytest.mark.parametrize("name", MATERIALS)
@pytest.mark.parametrize("tinted", [False, True])
def test_dress_keeps_the_shape(name: str, tinted: bool, sprites: Tensor) -> None:
    light = torch.tensor([[-0.6, -0.8], [0.6, -0.8]])
    red = torch.tensor([[0.87, 0.16, 0.16]]).expand(2, -1) if tinted else None
    dressed = dress(sprites, material(name, 4, 96, 2), name, light, red)
    check(dressed, (2, 4, 96, 96))
    assert (dressed[:, :3] <= dressed[:, 3:] + 1e-6).all()  # premultiplied
    if name == "glass":
        assert (dressed[:, 3] <= sprites[:, 3]).all()
        assert (dressed[:, 3] >= 0.3 * sprites[:, 3]).all()
    else:
        assert torch.equal(dressed[:, 3], sprites[:, 3])
    left, right = (dressed[1, :3, :, half].sum() for half in (slice(0, 48), slice(48, 96)))
    assert left < 0.9 * right  # what was dark in the drawing stays darker
    if tinted:
        red_part, green_part = dressed[:, 0].sum(), dressed[:, 1].sum()
        assert red_part > 1.2 * green_part


def test_light_comes_from_where_it_is_said(sprites: Tensor) -> None:
    plain = torch.full((2, 3, 96, 96), 0.5)
    left, right = (dress(sprites, plain, "stone", torch.tensor([[x, 0.0]] * 2)) for x in (-1.0, 1.0))
    difference = (left - right)[0, :3].sum((0, 1))  # of the white star, by column
    assert difference[:48].sum() > 1 > -1 > difference[48:].sum()
