"""Scenes to images, on the GPU: sprites with mip levels, composited over a background."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from training.scenes import PATTERNS, PLACES, SLOTS, STYLES, Batch

SIDE = 384  # of a sprite


def load_sprites(folder: Path, vocabulary: dict[str, Any]) -> Tensor:
    """All sprites [N, 4, SIDE, SIDE], premultiplied uint8: objects style by style, then white shapes."""
    paths = [folder / style / f"{c['name'].replace(' ', '-')}.webp" for style in STYLES for c in vocabulary["objects"]]
    missing = [str(p) for p in paths if not p.exists()]
    if missing:
        raise SystemExit(f"{len(missing)} sprites are missing, e.g. {missing[0]}: run python -m training.sprites")

    def read(path: Path) -> np.ndarray:
        return premultiplied(np.asarray(Image.open(path).convert("RGBA")))

    with ThreadPoolExecutor() as pool:
        images = list(pool.map(read, paths))
    images += [premultiplied(draw_shape(s["name"])) for s in vocabulary["shapes"]]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def stand_ins(vocabulary: dict[str, Any]) -> Tensor:
    """Tinted shapes in the place of all sprites, so that a smoke run needs no downloads."""
    shapes = torch.from_numpy(np.stack([premultiplied(draw_shape(s["name"], 48)) for s in vocabulary["shapes"]]))
    count = len(STYLES) * len(vocabulary["objects"])
    tints = torch.rand(count, 1, 1, 4, generator=torch.Generator().manual_seed(0))
    tints[..., 3] = 1
    objects = (shapes[torch.arange(count) % len(shapes)] * tints).byte()
    return torch.cat((objects, shapes)).permute(0, 3, 1, 2).contiguous()


def premultiplied(rgba: np.ndarray) -> np.ndarray:
    alpha = rgba[..., 3:].astype(np.uint16)
    color = ((rgba[..., :3] * alpha + 127) // 255).astype(np.uint8)
    return np.concatenate((color, rgba[..., 3:]), axis=-1)


def draw_shape(name: str, side: int = SIDE) -> np.ndarray:
    """White on nothing, RGBA."""
    big = 4 * side
    image = Image.new("L", (big, big))
    draw = ImageDraw.Draw(image)
    low, high, middle = 0.05 * big, 0.95 * big, big / 2

    def polygon(*points: tuple[float, float]) -> None:
        draw.polygon([(middle + x * 0.45 * big, middle + y * 0.45 * big) for x, y in points], fill=255)

    def spokes(n: int, radii: tuple[float, ...], turn: float = -0.25) -> list[tuple[float, float]]:
        angles = [2 * np.pi * (i / n + turn) for i in range(n)]
        return [(np.cos(a) * radii[i % len(radii)], np.sin(a) * radii[i % len(radii)]) for i, a in enumerate(angles)]

    if name in ("circle", "ring"):
        draw.ellipse((low, low, high, high), fill=255)
        if name == "ring":
            draw.ellipse((0.26 * big, 0.26 * big, 0.74 * big, 0.74 * big), fill=0)
    elif name == "square":
        draw.rectangle((0.1 * big, 0.1 * big, 0.9 * big, 0.9 * big), fill=255)
    elif name == "triangle":
        polygon((0, -0.9), (1, 0.85), (-1, 0.85))
    elif name == "star":
        polygon(*spokes(10, (1.0, 0.42)))
    elif name == "heart":
        t = np.linspace(0, 2 * np.pi, 400)
        x = 16 * np.sin(t) ** 3
        y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
        polygon(*zip(x / 16.5, -(y + 2.5) / 16.5, strict=True))
    elif name == "diamond":
        polygon((0, -1), (0.72, 0), (0, 1), (-0.72, 0))
    elif name == "hexagon":
        polygon(*spokes(6, (1.0,), 0.0))
    elif name == "cross":
        draw.rectangle((0.36 * big, low, 0.64 * big, high), fill=255)
        draw.rectangle((low, 0.36 * big, high, 0.64 * big), fill=255)
    else:
        raise ValueError(f"no drawing of {name!r}")
    mask = np.asarray(image.resize((side, side), Image.Resampling.BOX))
    return np.dstack((np.full((side, side, 3), 255, np.uint8), mask))


def coordinates(side: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """y and x of every pixel's middle, in 0..1."""
    line = torch.arange(side, device=device).add(0.5).div(side)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return y, x


def patterns(side: int) -> Tensor:
    """How much of the second color, [PATTERNS, side, side] in 0..1."""
    y, x = coordinates(side)
    soft = side / 2  # edges one or two pixels wide, so that no pattern flickers

    def edge(distance: Tensor) -> Tensor:
        return distance.mul(soft).add(0.5).clamp(0, 1)

    stripes = edge((((x + y) * 4) % 1 - 0.5).abs().sub(0.25) / 5.66)
    u, v = (x * 8) % 1 - 0.5, (y * 8) % 1 - 0.5
    dots = edge((0.25 - (u**2 + v**2).sqrt()) / 8)
    checks = ((x * 8).floor() + (y * 8).floor()) % 2
    return torch.stack((torch.zeros_like(x), y, stripes, dots, checks))


def places(side: int) -> Tensor:
    """The named backgrounds, [PLACES, 3, side, side] in 0..1."""
    y, x = coordinates(side)

    def rgb(*values: int) -> Tensor:
        return torch.tensor(values).float().div(255)[:, None, None]

    def blend(top: Tensor, bottom: Tensor, share: Tensor) -> Tensor:
        return top * (1 - share) + bottom * share

    def below(line: Tensor) -> Tensor:
        return ((y - line) * side / 2 + 0.5).clamp(0, 1)

    hills = 0.66 + 0.05 * torch.sin(2 * torch.pi * (x + 0.1))
    sky = blend(rgb(120, 190, 245), rgb(215, 238, 255), (y / 0.7).clamp(0, 1))
    meadow = blend(sky, blend(rgb(120, 200, 80), rgb(70, 150, 55), ((y - 0.6) / 0.4).clamp(0, 1)), below(hills))
    sea = blend(sky, blend(rgb(40, 130, 205), rgb(70, 185, 220), ((y - 0.55) / 0.2).clamp(0, 1)), below(x * 0 + 0.55))
    sand = blend(rgb(240, 215, 155), rgb(225, 190, 125), ((y - 0.72) / 0.28).clamp(0, 1))
    beach = blend(sea, sand, below(0.74 + 0.02 * torch.sin(4 * torch.pi * x)))
    far = blend(blend(rgb(250, 200, 120), rgb(255, 235, 190), y), rgb(235, 170, 90), below(hills - 0.06))
    desert = blend(far, rgb(215, 145, 70), below(0.78 - 0.05 * torch.sin(2 * torch.pi * (x + 0.3))))
    snow = blend(blend(rgb(170, 205, 235), rgb(225, 238, 248), y), rgb(248, 251, 255), below(hills))
    night = blend(rgb(10, 14, 48), rgb(44, 44, 100), y)
    for i, (u, v) in enumerate(np.random.default_rng(7).random((40, 2)).tolist()):  # stars stand still
        star = ((0.004 + 0.002 * (i % 3) - ((x - u) ** 2 + (y - v) ** 2).sqrt()) * side / 2 + 0.5).clamp(0, 1)
        night = blend(night, rgb(255, 250, 215), star)
    deep = blend(rgb(60, 175, 225), rgb(10, 60, 140), y)
    sunset = blend(blend(rgb(75, 50, 120), rgb(250, 130, 70), (y / 0.7).clamp(0, 1)), rgb(50, 35, 70), below(hills))
    drawn = {
        "meadow": meadow,
        "beach": beach,
        "desert": desert,
        "snow": snow,
        "night": night,
        "sea": deep,
        "sunset": sunset,
    }
    return torch.stack([drawn[name].expand(3, side, side) for name in PLACES])


class Painter:
    def __init__(self, sprites: Tensor, device: torch.device | str, side: int = 512) -> None:
        self.side, self.device = side, torch.device(device)
        level = sprites.to(self.device)
        self.mips = [level]  # one sprite is sampled from the level that is nearest to its size
        while level.shape[-1] > 24 and len(self.mips) < 5:
            level = F.avg_pool2d(level.float(), 2).round().byte()
            self.mips.append(level)
        self.patterns, self.places = patterns(side).to(self.device), places(side).to(self.device)
        self.y, self.x = coordinates(side, self.device)

    @torch.no_grad()
    def paint(self, batch: Batch, at_once: int = 128) -> Tensor:
        """Images [B, 3, side, side] in [-1, 1]."""
        n = len(batch.sprite)
        return torch.cat([self._paint(batch, slice(i, i + at_once)) for i in range(0, n, at_once)])

    def _paint(self, batch: Batch, rows: slice) -> Tensor:
        def send(values: Tensor) -> Tensor:
            return values.to(self.device, non_blocking=True)

        out = self.backgrounds(send(batch.background[rows]), send(batch.colors[rows]).float().div(255))
        for slot in range(SLOTS):
            sprite, place = batch.sprite[rows, slot], batch.place[rows, slot]
            # The host decides which rows go together, so the device never waits for it.
            ratio = self.mips[0].shape[-1] / (place[:, 2].clamp_min(1e-3) * self.side)
            level = ratio.log2().round().clamp(0, len(self.mips) - 1)
            for mip, sprites in enumerate(self.mips):
                (chosen,) = torch.where((sprite >= 0) & (level == mip))
                if len(chosen):
                    tint = batch.tint[rows, slot][chosen]
                    out = self.put(out, sprites, send(chosen), send(sprite[chosen]), send(place[chosen]), send(tint))
        return out.mul_(2).sub_(1)

    def backgrounds(self, kind: Tensor, colors: Tensor) -> Tensor:
        pattern = kind.clamp_max(len(PATTERNS) - 1)
        share = self.patterns[pattern][:, None]
        first, second = colors.unbind(1)
        # A pattern's second color is a lighter first one; a gradient has two of its own, a plain one needs none.
        second = torch.where((pattern > 1)[:, None], first * 0.55 + 0.45, second)[:, :, None, None]
        painted = first[:, :, None, None] * (1 - share) + second * share
        scenery = self.places[(kind - len(PATTERNS)).clamp_min(0)]
        return torch.where((kind >= len(PATTERNS))[:, None, None, None], scenery, painted)

    def put(self, out: Tensor, sprites: Tensor, rows: Tensor, which: Tensor, place: Tensor, tint: Tensor) -> Tensor:
        x, y, size = place[:, :, None, None].unbind(1)
        grid = torch.stack(((self.x - x) / size * 2, (self.y - y) / size * 2), dim=-1)
        drawn = F.grid_sample(sprites[which].float().div_(255), grid, align_corners=False)
        color, alpha = drawn[:, :3] * tint.float().div(255)[:, :, None, None], drawn[:, 3:]
        return out.index_copy(0, rows, color + out[rows] * (1 - alpha))
