"""What things are made of: wood, marble, wool, metal; and the dress that puts it on a drawn thing, with its shading."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from training.textured.noise import (
    Canvas,
    cells,
    colors,
    fractal,
    grain_of_wood,
    knit,
    lit,
    mix,
    noise,
    ramp,
    relief,
    smooth,
    turn,
    veins,
    warped,
)
from training.textured.places import MARBLES, WOODS

METALS = {"golden": "3E2204 A86A10 F0B830 FFE890 FFFFF0", "silver": "20242C 6C747E B4BCC4 ECF0F4 FFFFFF"}
PATTERNED = ("striped", "dotted", "checkered")  # two colors, and no surface of its own


def wooden(c: Canvas) -> Tensor:
    x, y = turn(c.x, c.y, c.uniform(-0.4, 0.4) + c.chance(0.3) * math.pi / 2)
    ring, fibers = grain_of_wood(c, x * 0.9 + c.uniform(0, 9), y * 0.9 + c.uniform(0, 9), c.uniform(9, 14))
    return ramp(c.palette(*WOODS), 0.75 - 0.62 * ring + 0.16 * fibers)


def marble(c: Canvas) -> Tensor:
    x, y = turn(c.x, c.y, c.uniform(0, math.pi))
    scale = c.uniform(1.6, 2.8)
    body, line = veins(c, x * scale, y * scale)
    color = c.palette(*MARBLES, spread=0.03)
    return mix(ramp(color[:, :2], 0.4 + 0.9 * body), color[:, 2], line)


def knitted(c: Canvas) -> Tensor:
    x, y = turn(c.x, c.y, c.uniform(-0.3, 0.3))
    many = c.uniform(13, 18)
    u, v = x + 0.015 * noise(c, x * 3, y * 3), y + 0.015 * noise(c, x * 3, y * 3)
    yarn, _, row = knit(u * many, v * many * 1.25)
    color = c.palette("C0303A F4E8DC", "2A5A8E E8EEF4", "3A8058 F4ECD4", "E0A030 FFF4DC", "A05A9C F8E4F0")
    stripe = (row % 6 < 2).float() * c.chance(0.4)
    return lit(mix(color[:, 0], color[:, 1], stripe), 0.9 * (yarn - 0.65) + 0.14 * fractal(c, u * 110, v * 110, 2, 0.9))


def metal(name: str) -> Callable[[Canvas], Tensor]:
    def paint(c: Canvas) -> Tensor:
        """Hammered, brushed or scratched: only what `dress` turns into reflections, around the middle of the ramp."""
        near, _, a, _ = cells(c, c.x * 13, c.y * 13, 0.8)
        x, y = turn(c.x, c.y, c.uniform(0, math.pi))
        hammered, brushed = c.chance(0.5), fractal(c, x * 4, y * 45, 4, 0.9)
        tone = 0.5 + 0.12 * fractal(c, c.x * 3, c.y * 3, 4, 0.6)
        dent = relief(near.clamp_max(0.7) ** 2 * 0.02, c.light(), 1.6)
        tone = tone + hammered * (0.2 * dent + 0.06 * (a - 0.5)) + (0.09 - 0.03 * hammered) * brushed
        return ramp(c.palette(METALS[name], spread=0.02), tone)

    return paint


def stone(c: Canvas) -> Tensor:
    color = c.palette("5A5854 96928A CCC8BE", "6A5A48 AA947A DCCCB0", "4C545C 848E98 BCC6CE")
    body = fractal(c, c.x * 5, c.y * 5, 6, 0.7)
    near, _, a, _ = cells(c, c.x * 22, c.y * 22)
    pit = smooth(0.30, 0.12, near / (0.3 + a))
    u, v = warped(c, c.x * 2.4, c.y * 2.4, 0.4, 4)
    first, second, _, _ = cells(c, u, v)
    crack = smooth(0.035, 0.008, second - first)
    speck = fractal(c, c.x * 70, c.y * 70, 2, 0.9)
    shade = 0.7 * relief(body * 0.012 - 0.006 * pit - 0.012 * crack, c.light(), 1.0)
    return lit(ramp(color, 0.5 + 0.25 * body + 0.16 * speck), shade - 0.4 * crack - 0.15 * pit)


def glass(c: Canvas) -> Tensor:
    color = c.palette("1E7A9C 7CD0E4 E8FCFF", "2A8A5A 8CE0B0 ECFFF4", "6A5ACC B4A8F4 F4F0FF", "B8506A F4A8B8 FFF0F4")
    u, v = warped(c, c.x * 2.2, c.y * 2.2, 0.8, 3)
    swirl = fractal(c, u, v, 4, 0.5)
    streak = torch.sin(swirl * 5 + (c.x + c.y) * 4)
    near, _, a, _ = cells(c, c.x * 11, c.y * 11)
    size = 0.06 + 0.2 * a * a
    seed = smooth(size, size * 0.8, near) * smooth(size * 0.4, size * 0.8, near) * (a > 0.35)
    return ramp(color, 0.33 + 0.13 * streak + 0.06 * swirl) + (0.35 * seed)[:, None]


PAIRS = (
    "D8343A FFF6EC",
    "2E68D0 F4F8FF",
    "2E9A58 F6F4DC",
    "F08A28 FFF4DC",
    "7A44B8 F6E8FF",
    "E8609A FFF2F6",
    "2A2C34 F0C83A",
    "1E8E94 F4FCFA",
)


def pair(c: Canvas, share: Tensor) -> Tensor:
    """Two colors, printed on fine cloth."""
    two = c.palette(*PAIRS)
    thread = torch.sin(c.x * 300) * torch.sin(c.y * 300) * 0.05 if c.pixel < 0.008 else 0 * c.x
    return lit(mix(two[:, 0], two[:, 1], share), thread + 0.05 * fractal(c, c.x * 40, c.y * 40, 3, 0.8))


def striped(c: Canvas) -> Tensor:
    x, _ = turn(c.x, c.y, c.uniform(-0.9, 0.9) + c.chance(0.5) * math.pi / 2)
    many = c.uniform(6, 10)
    wave = ((x + 0.01 * noise(c, c.x * 3, c.y * 3)) * many + c.uniform(0, 1)) % 1
    soft = 1.5 * many * c.pixel
    return pair(c, smooth(-soft, soft, 0.25 - (wave - 0.5).abs()))


def dotted(c: Canvas) -> Tensor:
    many = c.uniform(6, 9.5)
    x, y = turn(c.x * many, c.y * many, c.uniform(0.2, 1.3))
    x, y = x + c.uniform(0, 1), y + c.uniform(0, 1)
    away = ((x % 1 - 0.5) ** 2 + (y % 1 - 0.5) ** 2).sqrt()
    soft = 1.5 * many * c.pixel
    return pair(c, smooth(-soft, soft, c.uniform(0.26, 0.34) - away))


def checkered(c: Canvas) -> Tensor:
    many = c.uniform(6, 9)
    x, y = turn(c.x * many, c.y * many, c.uniform(-0.4, 0.4))
    x, y = x + c.uniform(0, 1), y + c.uniform(0, 1)
    soft = 3 * many * c.pixel
    waves = torch.sin(x * math.pi) * torch.sin(y * math.pi)
    return pair(c, smooth(-soft, soft, waves))


def furry(c: Canvas) -> Tensor:
    u, v = turn(c.x, c.y, c.uniform(-0.5, 0.5))
    first, _, a, b = cells(c, *warped(c, u * 11, v * 6, 0.35, 2))
    p, q = turn(u + 0.05 * noise(c, u * 3, v * 3), v, (a - 0.5) * 0.9)  # each tuft leans its own way
    hair = fractal(c, p * 85, q * 8, 3, 0.85)
    color = c.palette("3A200E A8683A F4D0A0", "5A4834 C4AC8C FFFAE8", "1E1E24 6C6C76 D4D4DC", "6A2C0C DC7A2C FFDCA8")
    return ramp(color, 0.5 + 0.34 * hair + 0.5 * (0.45 - first) + 0.22 * (b - 0.5))


def leather(c: Canvas) -> Tensor:
    u, v = warped(c, c.x * 24, c.y * 24, 0.35, 2)
    first, second, a, _ = cells(c, u, v)
    gap = second - first
    fold = fractal(c, c.x * 2.5, c.y * 2.5, 5, 0.6, ridged=True)
    color = c.palette("3A1C0C 8A4E24 C8884A", "2A1410 6A2C22 A85A44", "14100E 40362E 84766A", "5A3C1C B8884E E4C08C")
    shade = 0.8 * relief(gap.clamp_max(0.35) * 0.02 - fold * 0.006, c.light(), 1.2)
    return lit(ramp(color, 0.45 + 0.5 * (gap.clamp_max(0.35) - 0.15) + 0.2 * (a - 0.5) - 0.14 * fold), shade)


def wicker(c: Canvas) -> Tensor:
    many = c.uniform(10, 14)
    x, y = c.x * many * 0.62 + c.uniform(0, 1), c.y * many * 1.5 + c.uniform(0, 1)
    row = y.floor()
    phase = x + (row % 2)
    bulge = torch.cos(phase * math.pi)
    round_ = 1 - (2 * (y - row) - 1) ** 2
    straw = fractal(c, x * 3 + row * 7.7, y * 9, 3, 0.8)
    tone = 0.2 + 0.3 * bulge + 0.42 * round_.clamp_min(0).sqrt() + 0.12 * straw + 0.1 * noise(c, row * 3.3, x / 3)
    return ramp(c.palette("3E2410 A8743A F0CC8C", "4A3018 C09452 FCE4B0"), tone)


MATERIALS: dict[str, Callable[[Canvas], Tensor]] = {
    "wooden": wooden,
    "marble": marble,
    "knitted": knitted,
    "golden": metal("golden"),
    "silver": metal("silver"),
    "stone": stone,
    "glass": glass,
    "striped": striped,
    "dotted": dotted,
    "checkered": checkered,
    "furry": furry,
    "leather": leather,
    "wicker": wicker,
}


def draw_material(name: str, count: int, side: int, generator: torch.Generator) -> Tensor:
    """Squares of a material without shading, [count, 3, side, side] in 0..1, on the generator's device."""
    c = Canvas.of(count, side, side, generator)
    out = MATERIALS[name](c).clamp(0, 1)
    return torch.where(c.rand(1, 1, 1) < 0.5, out.flip(-1), out)


def blurred(image: Tensor, share: float) -> Tensor:
    """[n, k, s, s], softened over this share of its side."""
    width = max(1, round(image.shape[-1] * share / 2)) * 2 + 1
    for _ in range(2):
        image = F.avg_pool2d(image, (width, 1), 1, (width // 2, 0), count_include_pad=True)
        image = F.avg_pool2d(image, (1, width), 1, (0, width // 2), count_include_pad=True)
    return image


GRAY = (0.299, 0.587, 0.114)


def luminance(color: Tensor) -> Tensor:
    """[n, 3, ...] to [n, ...]."""
    return sum(w * color[:, i] for i, w in enumerate(GRAY))  # type: ignore[return-value]


def dress(sprite: Tensor, material: Tensor, name: str, light: Tensor, tint: Tensor | None = None) -> Tensor:
    """The thing of a sprite [n, 4, s, s] (premultiplied) made of a material [n, 3, s, s]: premultiplied RGBA.

    The sprite's own lights, darks and outlines stay, and its edge is rounded: `light` [n, 2] points to the light.
    `tint` [n, 3] dyes it. Alpha stays as it is, but glass is thinner in the middle.
    """
    alpha = sprite[:, 3]
    own = sprite[:, :3] / alpha.clamp_min(1e-3)[:, None]
    area = alpha.flatten(1).sum(1).clamp_min(1.0)[:, None, None]
    shade = luminance(own) - (luminance(own) * alpha).sum((1, 2), keepdim=True) / area
    shade = shade * (alpha > 0.5)  # the drawing's lights and darks, of about the same strength in all drawings
    strength = (shade.square().sum((1, 2), keepdim=True) / area).sqrt()
    shade = shade * (0.20 / strength.clamp_min(0.10))
    soft = blurred(sprite, 0.02)
    inside = smooth(0.75, 1.0, soft[:, 3])
    line = ((own - soft[:, :3] / soft[:, 3:].clamp_min(1e-3)).abs().amax(1) * inside * 4).clamp(0, 1)  # its outlines

    beam = light[:, 0, None, None], light[:, 1, None, None]
    rim, wide = blurred(alpha[:, None], 0.03)[:, 0], blurred(alpha[:, None], 0.11)[:, 0]
    height = 0.030 * rim + 0.09 * wide + 0.020 * blurred(shade[:, None], 0.01)[:, 0]
    bevel = relief(height, beam, 0.9) * alpha
    depth = wide.clamp(0, 1)

    if tint is not None and name not in METALS:
        material = dyed(material, tint, name)
    if name in METALS:
        out = shining(material, name, bevel, shade, depth, tint)
    else:
        out = lit(material, 0.55 * bevel + (0.85 * shade).clamp(-0.6, 0.5))
    out = lit(out, -0.6 * line)
    if name == "glass":
        glare = blurred(alpha[:, None], 0.05)[:, 0]
        slope = torch.linspace(-1, 1, alpha.shape[-1], device=alpha.device)
        across = slope[None, :, None] * beam[1] + slope[None, None] * beam[0] + 0.35 * bevel
        bands = smooth(0.06, 0.02, (across - 0.34).abs()) + 0.6 * smooth(0.03, 0.01, (across - 0.47).abs())
        edge = smooth(0.98, 0.7, glare)
        gloss = (0.85 * smooth(0.3, 0.8, bevel) + 0.5 * bands * smooth(0.85, 1.0, glare) + 0.25 * edge).clamp(0, 1)
        out = out + (1 - out) * gloss[:, None]
        alpha = alpha * (0.55 + 0.45 * torch.maximum(torch.maximum(gloss, line), 0.8 * edge))
    elif name in ("marble", "leather"):  # polished
        out = out + (1 - out) * (0.45 * smooth(0.45, 0.95, bevel))[:, None]
    return torch.cat((out.clamp(0, 1) * alpha[:, None], alpha[:, None]), 1)


def dyed(material: Tensor, tint: Tensor, name: str) -> Tensor:
    """The material in another color: its lights and darks stay. Of two colors, only the first changes."""
    tone = luminance(material)
    tone = tone - tone.mean((1, 2), keepdim=True)
    tone = tone / tone.square().mean((1, 2), keepdim=True).sqrt().clamp_min(0.02)
    if name in PATTERNED:
        bright = luminance(tint)[:, None] > 0.75
        other = torch.where(bright, torch.full_like(tint, 0.25), torch.full_like(tint, 0.97))
        return mix(tint, other, (0.5 + 0.75 * tone).clamp(0, 1))
    return ramp(
        torch.stack((tint * 0.3, tint * 0.95 + 0.02, tint * 0.55 + 0.45), 1), 0.5 + 0.16 * tone.clamp(-2.2, 2.2)
    )


def shining(material: Tensor, name: str, bevel: Tensor, shade: Tensor, depth: Tensor, tint: Tensor | None) -> Tensor:
    """Metal: bands of reflected light that follow the surface."""
    stops = colors(METALS[name]).to(material.device)[None].expand(len(material), -1, -1)
    if tint is not None:
        gray = luminance(colors(METALS["silver"]).T[None]).to(material.device)[..., None]
        stops = torch.where(
            gray < 0.78, tint[:, None] * gray / 0.78, tint[:, None] + (1 - tint[:, None]) * (gray - 0.78) / 0.22
        )
    grain = luminance(material)
    grain = grain - grain.mean((1, 2), keepdim=True)
    y = torch.linspace(-1, 1, material.shape[-1], device=material.device)[None, :, None]
    turnings = 0.5 * torch.sin(5.5 * bevel + 3.0 * depth + 2.2 * y + 2.5 * shade)
    band = torch.exp(-(((bevel - 0.55) / 0.16) ** 2)) + 0.7 * torch.exp(-(((depth - 0.78 - 0.15 * y) / 0.035) ** 2))
    tone = 0.46 + 0.36 * bevel + 0.2 * turnings + 0.9 * shade.clamp(-0.35, 0.3) + 0.9 * grain + 0.32 * band
    return ramp(stops, tone)
