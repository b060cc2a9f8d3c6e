"""Textured scenes to images, on the GPU: things of a material and their soft shadows over a place or a pattern.

The host decides which rows go together, so the device never waits for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from nextscale.engine.schedule import infinity_schedule
from training import painter as former
from training.painter import premultiplied
from training.textured.materials import GRAY, draw_material, dress
from training.textured.places import draw_place
from training.textured.scenes import PATTERNS, Batch, read_vocabulary

PATCH = 1.9  # sides of a sprite that a thing and its shadow can take
AT_ONCE = 24  # textures that are drawn together
COARSE = 24  # pixels of the blurred alpha that a shadow is


def load_sprites(folder: Path, vocabulary: dict[str, Any]) -> Tensor:
    """All sprites [N, 4, side, side], premultiplied uint8: objects style by style, then white shapes and letters."""
    masks = []
    for letter in vocabulary["letters"]:
        path = folder / "letters" / f"{letter['sign']}.webp"
        if not path.exists():
            raise SystemExit(f"{path} is missing: run python -m training.textured.letters")
        masks.append(np.asarray(Image.open(path).convert("L")))
    alpha = np.stack(masks)
    rgba = np.stack([np.full_like(alpha, 255)] * 3 + [alpha], axis=-1)
    letters = torch.from_numpy(premultiplied(rgba)).permute(0, 3, 1, 2)
    return torch.cat((former.load_sprites(folder, vocabulary), letters))


def stand_ins(vocabulary: dict[str, Any]) -> Tensor:
    """Shapes in the place of all sprites, so that a smoke run needs no downloads."""
    sprites = former.stand_ins(vocabulary)
    shapes = sprites[-len(vocabulary["shapes"]) :]
    return torch.cat((sprites, shapes[torch.arange(len(vocabulary["letters"])) % len(shapes)]))


def recolored(sprite: Tensor, tint: Tensor) -> Tensor:
    """The sprite in this color [n, 3], which its middle tone becomes; its lights and darks stay. White is the color."""
    alpha, color = sprite[:, 3:], tint[:, :, None, None]
    gray = (sprite[:, :3] * sprite.new_tensor(GRAY)[:, None, None]).sum(1, keepdim=True)  # premultiplied
    mean = gray.sum((2, 3), keepdim=True) / alpha.sum((2, 3), keepdim=True).clamp_min(1e-3)
    tone = gray / alpha.clamp_min(1e-3) / mean.clamp_min(0.2)  # 1 in the middle
    light = ((tone - 1) / 0.9).clamp(0, 1)
    return torch.cat((torch.lerp(color * tone.clamp_max(1), torch.ones_like(tone), light) * alpha, alpha), dim=1)


class Bank:
    """Pictures of every texture in every size asked for, of which one after the other is drawn anew."""

    def __init__(self, draw: Any, variants: int, generator: torch.Generator) -> None:
        self.draw, self.variants, self.generator = draw, variants, generator
        self.kept: dict[tuple[str, int, int], Tensor] = {}
        self.turn = 0

    def __call__(self, name: str, height: int, width: int) -> Tensor:
        """[variants, 3, height, width], uint8; of what is not square, which is rarer, a third as many."""
        key = (name, height, width)
        if key not in self.kept:
            count = self.variants if height == width else -(-self.variants // 3)
            self.kept[key] = torch.cat([self.drawn(key, min(AT_ONCE, count - i)) for i in range(0, count, AT_ONCE)])
        return self.kept[key]

    def drawn(self, key: tuple[str, int, int], count: int) -> Tensor:
        return self.draw(key[0], count, *key[1:], self.generator).mul(255).round().byte()

    def renew(self, count: int = 2) -> None:
        """Draw some pictures of one texture again, so that none is seen all the time."""
        keys = [key for key, images in self.kept.items() if len(images) > count]
        if keys:
            self.turn += 1
            key = keys[self.turn % len(keys)]
            start = self.turn // len(keys) * count % (len(self.kept[key]) - count + 1)
            self.kept[key][start : start + count] = self.drawn(key, count)


class Painter:
    def __init__(
        self, sprites: Tensor, device: torch.device | str, side: int = 512, variants: int = 48, seed: int = 0
    ) -> None:
        """`variants` of every place and material are kept on the device."""
        self.side, self.device = side, torch.device(device)
        vocabulary = read_vocabulary()
        level = sprites.to(self.device)
        self.mips = [level]  # one sprite is sampled from the level that is nearest to its size
        while level.shape[-1] > 24 and len(self.mips) < 5:
            level = F.avg_pool2d(level.float(), 2).round().byte()
            self.mips.append(level)
        self.materials = [m["name"] for m in vocabulary["materials"]]
        self.places = [(b.get("draw", b["name"]), b.get("shadow")) for b in vocabulary["backgrounds"] if "say" in b]
        generator = torch.Generator(self.device).manual_seed(seed)
        self.place_bank = Bank(draw_place, variants, generator)
        self.material_bank = Bank(lambda name, n, h, _, g: draw_material(name, n, h, g), variants, generator)

    def size(self, ratio: float) -> tuple[int, int]:
        """Height and width in pixels: the grid of the schedule whose square one has this side."""
        squares = infinity_schedule(1.0).grids
        number = next(i for i, (h, _) in enumerate(squares) if h == self.side // 8)
        h, w = infinity_schedule(ratio).grids[number]
        return 8 * h, 8 * w

    @torch.no_grad()
    def paint(self, batch: Batch, at_once: int = 128) -> Tensor:
        """Images [B, 3, height, width] in [-1, 1]."""
        n = len(batch.thing)
        images = torch.cat([self._paint(batch, slice(i, i + at_once)) for i in range(0, n, at_once)])
        self.place_bank.renew()
        self.material_bank.renew()
        return images

    def send(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)

    def _paint(self, batch: Batch, rows: slice) -> Tensor:
        height, width = self.size(batch.ratio)
        out, kinds = self.backgrounds(batch, rows, height, width), batch.background[rows]
        shadows = [None] * len(PATTERNS) + [shadow for _, shadow in self.places]
        cast = {kind: torch.tensor([s == kind for s in shadows])[kinds] for kind in ("wall", "ground")}
        n = len(out)
        # Things do not touch, so sums compose them: color, alpha, shadow.
        ink = out.new_zeros(n * height * width, 5)
        thing, material, place = batch.thing[rows], batch.material[rows], batch.place[rows]
        level = (self.mips[0].shape[-1] / (place[..., 2].clamp_min(1e-3) * self.side)).log2().round()
        level = level.clamp(0, len(self.mips) - 1)
        tinted, light = batch.tinted[rows], batch.light[rows]
        for mip, sprites in enumerate(self.mips):
            for kind in range(-1, len(self.materials)):
                for colored in (False, True):
                    chosen = (thing >= 0) & (level == mip) & (material == kind)
                    row, slot = torch.where(chosen & (tinted == colored))
                    if not len(row):
                        continue
                    drawn = self.send(thing[row, slot])
                    sprite = sprites[drawn].float().div_(255)
                    tint = self.send(batch.tint[rows][row, slot]).float().div(255)
                    lit = self.send(light[row])
                    if kind < 0 and colored:
                        sprite = recolored(sprite, tint)
                    elif kind >= 0:
                        name, side = self.materials[kind], sprite.shape[-1]
                        bank = self.material_bank(name, side, side)
                        which = ((batch.chance[rows][row, 0] * 997).long() + thing[row, slot]) % len(
                            bank
                        )  # copies are alike
                        texture = bank[self.send(which)].float().div_(255)
                        sprite = dress(sprite, texture, name, lit, tint if colored else None)
                    at, sizes = self.send(place[row, slot]), (height, width)
                    wall, ground = (self.send(cast[k][row]) for k in ("wall", "ground"))
                    # Nothing casts a shadow on the sky.
                    ground = ground * ((at[:, 1] + at[:, 2] / 2) * self.side / height * 6 - 2.6).clamp(0, 1)
                    self.put(ink, sizes, sprite, self.send(row), at, lit, wall, ground)
        ink = ink.view(n, height, width, 5).permute(0, 3, 1, 2)
        strength = self.send(0.3 + 0.3 * batch.chance[rows, 1])[:, None, None, None]
        out = out * (1 - ink[:, 4:].clamp(0, 1) * strength)
        out = ink[:, :3] + out * (1 - ink[:, 3:4]).clamp_min(0)
        return out.clamp_(0, 1).mul_(2).sub_(1)

    def backgrounds(self, batch: Batch, rows: slice, height: int, width: int) -> Tensor:
        kinds, chance = batch.background[rows], batch.chance[rows]
        colors = self.send(batch.colors[rows]).float().div(255)[..., None, None]
        share = self.send(kinds)[:, None, None, None]
        u, v, scale = (self.send(chance[:, i])[:, None, None, None] for i in (2, 3, 4))
        second = torch.where(share > 1, colors[:, 0] * 0.55 + 0.45, colors[:, 1])
        share = self.pattern(share, u, v, scale, height, width)
        out = colors[:, 0] * (1 - share) + second * share
        for number, (name, _) in enumerate(self.places):
            (chosen,) = torch.where(kinds == len(PATTERNS) + number)
            if len(chosen):
                bank = self.place_bank(name, height, width)
                which = (chance[chosen, 5] * len(bank)).long()
                scenery = bank[self.send(which)].float().div_(255)
                mirrored = self.send(chance[chosen, 6] < 0.5)[:, None, None, None]
                out.index_copy_(0, self.send(chosen), torch.where(mirrored, scenery.flip(-1), scenery))
        return out

    def pattern(self, kind: Tensor, u: Tensor, v: Tensor, scale: Tensor, height: int, width: int) -> Tensor:
        """How much of the second color, [B, 1, height, width] in 0..1: its place, size and direction vary."""
        y = (torch.arange(height, device=self.device) + 0.5)[:, None] / self.side
        x = (torch.arange(width, device=self.device) + 0.5)[None] / self.side
        many, soft = 3 + 3 * scale, self.side / 2

        def edge(distance: Tensor) -> Tensor:  # one or two pixels wide, so that no pattern flickers
            return distance.mul(soft).add(0.5).clamp(0, 1)

        slope = torch.where(v < 0.5, x - y, x + y)
        stripes = edge((((slope * many + u) % 1 - 0.5).abs() - 0.25) / (1.41 * many))
        a, b = (x * 2 * many + u) % 1 - 0.5, (y * 2 * many + v) % 1 - 0.5
        dots = edge((0.25 - (a.square() + b.square()).sqrt()) / (2 * many))
        checks = ((x * 2 * many + u).floor() + (y * 2 * many + v).floor()) % 2
        down = (y * self.side / height).expand(height, width)
        shares = (stripes, dots, checks)
        share = torch.where(kind == 1, down, torch.zeros_like(down))
        for number, drawn in enumerate(shares, 2):
            share = torch.where(kind == number, drawn, share)
        return share

    def put(
        self,
        ink: Tensor,
        shape: tuple[int, int],
        sprite: Tensor,
        rows: Tensor,
        place: Tensor,
        light: Tensor,
        wall: Tensor,
        ground: Tensor,
    ) -> None:
        """Add things [n, 4, s, s] at their places, and their shadows, to `ink` [pixels, 5]."""
        height, width = shape
        n, s = len(sprite), sprite.shape[-1]
        side = min(2 * round(PATCH * s / 2), 2 * max(shape))
        x, y, size, mirror = (place[:, i, None, None] for i in range(4))
        left, top = ((v * self.side).round().long() - side // 2 for v in (x, y))
        line = torch.arange(side, device=ink.device)
        across, down = left + line, top + line[:, None]  # pixels of the picture
        u = (across + 0.5 - x * self.side) / (size * self.side / 2)
        v = (down + 0.5 - y * self.side) / (size * self.side / 2)
        u, v = (t.expand(n, side, side) for t in (u, v))

        def sample(image: Tensor, u: Tensor, v: Tensor) -> Tensor:
            return F.grid_sample(image, torch.stack((u, v), dim=-1), align_corners=False)

        drawn = sample(sprite, u * mirror, v)
        coarse = F.avg_pool2d(sprite[:, 3:], max(1, s // COARSE))
        edge = max(2, coarse.shape[-1] // 5)
        grown = 1 + 2 * edge / coarse.shape[-1]
        blurred = F.avg_pool2d(F.pad(coarse, (edge,) * 4), 5, 1, 2)
        blurred = F.avg_pool2d(blurred, 3, 1, 1)
        dx, dy = (-light[:, i, None, None] * 0.12 for i in (0, 1))
        behind = sample(blurred, (u - dx) * mirror / grown, (v - dy) / grown)
        under = sample(blurred, (u - dx) * mirror / grown, (v - 0.93) / (0.2 * grown))
        shade = behind * wall[:, None, None, None] + under * ground[:, None, None, None]
        values = torch.cat((drawn, shade), dim=1)
        inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
        values = values * inside[:, None]
        at = rows[:, None, None] * (height * width) + down.clamp(0, height - 1) * width + across.clamp(0, width - 1)
        ink.index_add_(0, at.flatten(), values.permute(0, 2, 3, 1).reshape(-1, 5))
