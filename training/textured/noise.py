"""What textures are made of: noise, cells, dabs, weaves and light, for a batch of pictures at once on any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LATTICE = 64  # random values per side of a table, which then repeats


@dataclass(frozen=True)
class Canvas:
    """A batch of pictures to paint, and their chance."""

    count: int
    x: Tensor  # [1, h, w], to the right; 0 is the middle, 1 the side of a square of the same area
    y: Tensor  # [1, h, w], downwards
    generator: torch.Generator

    @staticmethod
    def of(count: int, height: int, width: int, generator: torch.Generator) -> Canvas:
        side = math.sqrt(height * width)
        down, across = (
            (torch.arange(n, device=generator.device) - (n - 1) / 2).div(side).float() for n in (height, width)
        )
        y, x = torch.meshgrid(down, across, indexing="ij")
        return Canvas(count, x[None], y[None], generator)

    @property
    def down(self) -> Tensor:
        """0 at the top, 1 at the bottom."""
        return self.y / (2 * self.y.amax()) + 0.5

    @property
    def pixel(self) -> float:
        """The side of a pixel in the units of x and y."""
        return float(1 / math.sqrt(self.x[0].numel()))

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(self.count, *shape, generator=self.generator, device=self.generator.device)

    def uniform(self, low: float, high: float) -> Tensor:
        """One number per picture, [n, 1, 1]."""
        return low + (high - low) * self.rand(1, 1)

    def row(self, low: float, high: float) -> Tensor:
        """A y between these shares of the height, [n, 1, 1]."""
        return (self.uniform(low, high) - 0.5) * 2 * self.y.amax()

    def chance(self, share: float) -> Tensor:
        """1 in this share of the pictures, 0 in the others, [n, 1, 1]."""
        return (self.rand(1, 1) < share).float()

    def palette(self, *choices: str, spread: float = 0.04) -> Tensor:
        """One of these rows of colors ("RRGGBB RRGGBB") for each picture, a little off, [n, k, 3]."""
        table = torch.stack([colors(choice) for choice in choices]).to(self.generator.device)
        chosen = table[(self.rand() * len(choices)).long().clamp_max(len(choices) - 1)]
        off = (self.rand(1, 1) * 2 - 1) + (self.rand(1, 3) - 0.5) / 2 + (self.rand(table.shape[1], 3) - 0.5) / 2
        return (chosen + off * spread).clamp(0, 1)

    def light(self) -> tuple[Tensor, Tensor]:
        """Where light comes from, x and y of a unit vector: above, more from the left or from the right."""
        angle = self.uniform(-0.85 * math.pi, -0.15 * math.pi)
        return angle.cos(), angle.sin()


def colors(row: str) -> Tensor:
    """ "RRGGBB RRGGBB" as [k, 3] in 0..1."""
    return torch.tensor([list(bytes.fromhex(word)) for word in row.split()]).float().div(255)


def smooth(low: Tensor | float, high: Tensor | float, t: Tensor) -> Tensor:
    """0 below `low`, 1 above `high`, a soft step between."""
    t = ((t - low) / (high - low)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def ramp(stops: Tensor, t: Tensor) -> Tensor:
    """The color at t in 0..1 of a row of stops [n, k, 3]: [n, 3, h, w]."""
    t = t.clamp(0, 1)[:, None] * (stops.shape[1] - 1)
    return sum((1 - (t - i).abs()).clamp_min(0) * stops[:, i, :, None, None] for i in range(stops.shape[1]))  # type: ignore[return-value]


def mix(a: Tensor, b: Tensor, share: Tensor) -> Tensor:
    """Pictures (or a color [n, 3]) a where share [n, h, w] is 0, b where it is 1."""
    a, b = (c[:, :, None, None] if c.dim() == 2 else c for c in (a, b))
    return a + (b - a) * share[:, None]


def turn(x: Tensor, y: Tensor, angle: Tensor | float) -> tuple[Tensor, Tensor]:
    angle = torch.as_tensor(angle, device=x.device)
    return x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()


def footprint(x: Tensor, y: Tensor) -> Tensor:
    """How far x and y move from one pixel to the next."""
    steps = [F.pad(t.diff(dim=-1), (0, 1, 0, 0), mode="replicate").abs() for t in (x, y)]
    steps += [F.pad(t.diff(dim=-2), (0, 0, 0, 1), mode="replicate").abs() for t in (x, y)]
    return torch.stack(torch.broadcast_tensors(*steps)).amax(0)


def noise(c: Canvas, x: Tensor, y: Tensor) -> Tensor:
    """Smooth random bumps about one unit apart, mostly within -1..1."""
    table = F.pad(c.rand(1, LATTICE, LATTICE) * 3 - 1.5, (2, 2, 2, 2), mode="circular")
    x, y = torch.broadcast_tensors(x + c.uniform(0, LATTICE), y + c.uniform(0, LATTICE))
    grid = (torch.stack((x, y), dim=-1) % LATTICE + 2.5) * (2 / (LATTICE + 4)) - 1
    return F.grid_sample(table, grid, mode="bicubic", align_corners=False)[:, 0]


def fractal(c: Canvas, x: Tensor, y: Tensor, octaves: int = 5, gain: float = 0.5, ridged: bool = False) -> Tensor:
    """Noise at one size, half of it, and so on, mostly within -1..1; `ridged`: sharp crests at 1.

    What is finer than pixels fades.
    """
    fine = footprint(x, y)
    total, weights = torch.zeros(1, device=x.device), 0.0
    for i in range(octaves):
        layer = noise(c, x, y)
        layer = 1 - 2.4 * layer.abs() if ridged else layer
        total = total + layer * (gain**i * (1.4 - 2.2 * fine * 2**i).clamp(0, 1))
        weights += gain ** (2 * i)
        x, y = 1.6 * x - 1.2 * y, 1.2 * x + 1.6 * y
    return total / math.sqrt(weights)


def warped(c: Canvas, x: Tensor, y: Tensor, by: Tensor | float, octaves: int = 3) -> tuple[Tensor, Tensor]:
    """Coordinates shifted by noise."""
    return x + by * fractal(c, x, y, octaves), y + by * fractal(c, x, y, octaves)


def at(table: Tensor, i: Tensor, j: Tensor) -> list[Tensor]:
    """The channels of random tables [n, k, LATTICE, LATTICE] in column i, row j."""
    i, j = torch.broadcast_tensors(i, j)
    index = (j.long() % LATTICE * LATTICE + i.long() % LATTICE).flatten(1)
    if len(index) < len(table):
        index = index.expand(len(table), -1)
    chosen = table.flatten(2).gather(2, index[:, None].expand(-1, table.shape[1], -1))
    return list(chosen.view(len(table), table.shape[1], *i.shape[1:]).unbind(1))


def numbers(c: Canvas, count: int, i: Tensor) -> list[Tensor]:
    """Random numbers in 0..1 that belong to each whole number i: to a column, a row."""
    return at(c.rand(count, LATTICE, LATTICE), i, 0 * i)


def cells(c: Canvas, x: Tensor, y: Tensor, jitter: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One random point in each unit square: distances to the nearest and the next, and two numbers of the nearest."""
    table = c.rand(4, LATTICE, LATTICE)
    x, y = x + c.uniform(0, LATTICE), y + c.uniform(0, LATTICE)
    i, j = x.floor(), y.floor()
    first = second = torch.full((1, 1, 1), 9.0, device=x.device)
    a = b = torch.zeros((1, 1, 1), device=x.device)
    for dj in (-1, 0, 1):
        for di in (-1, 0, 1):
            u, v, r, s = at(table, i + di, j + dj)
            distance = (
                (i + di + 0.5 + (u - 0.5) * jitter - x) ** 2 + (j + dj + 0.5 + (v - 0.5) * jitter - y) ** 2
            ).sqrt()
            nearer = distance < first
            second = torch.where(nearer, first, torch.minimum(second, distance))
            first, a, b = (torch.where(nearer, *pair) for pair in ((distance, first), (r, a), (s, b)))
    return first, second, a, b


Shape = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def dabs(c: Canvas, x: Tensor, y: Tensor, shape: Shape, share: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Things strewn over each other, one in each unit square (or in a `share` of them).

    `shape` gets where a pixel lies from a dab's middle, turned as the dab is, and two numbers of it in 0..1; it returns
    how deep inside the pixel is (0 or less: outside) and anything else. Both come back for the topmost dab, with its
    numbers.
    """
    table = c.rand(6, LATTICE, LATTICE)
    x, y = x + c.uniform(0, LATTICE), y + c.uniform(0, LATTICE)
    i, j = x.floor(), y.floor()
    top = depth = extra = a = b = torch.zeros((1, 1, 1), device=x.device)
    for dj in (-1, 0, 1):
        for di in (-1, 0, 1):
            u, v, angle, r, s, rank = at(table, i + di, j + dj)
            here, more = shape(*turn(x - (i + di) - u, y - (j + dj) - v, angle * 2 * math.pi), r, s)
            rank = torch.where((here > 0) & (rank < share), rank + 1e-6, -1.0)
            above = rank > top
            top, depth, extra, a, b = (
                torch.where(above, *pair) for pair in ((rank, top), (here, depth), (more, extra), (r, a), (s, b))
            )
    return depth, extra, a, b


def blades(
    c: Canvas, x: Tensor, rows: Tensor, grow: float = 1.09, length: float = 0.4, lean: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Grass on a plain: how far up the nearest blade a pixel lies (0 root, 1 tip, -1: no blade), and its number.

    `rows` is the distance below the horizon; blades stand at 1, grow, grow^2, ... times the first row's, and are as
    long as `length` times that.
    """
    table = c.rand(4, LATTICE, LATTICE)
    t = (rows.clamp_min(1e-4) / 0.03).log() / math.log(grow)
    up, number = torch.full_like(x + rows, -1.0), torch.zeros_like(x + rows)
    reach = math.ceil(math.log(1 / (1 - length)) / math.log(grow))
    for step in range(reach + 1):
        j = t.floor() + 1 + step
        base = 0.03 * grow**j
        width = 0.075 * base
        place = x / width + 17.3 * j
        for di in (-1, 0, 1):
            k = place.floor() + di
            u, tall, bend, r = at(table, k, j)
            high = (base - rows) / (length * base * (0.45 + 0.55 * tall))
            middle = k + u + (bend - 0.5 + lean) * 2.2 * high * high
            inside = ((place - middle).abs() < 0.42 * (1 - high).clamp_min(0).sqrt()) & (high < 1)
            up, number = torch.where(inside, high, up), torch.where(inside, r, number)
    return up, number


def relief(height: Tensor, light: tuple[Tensor, Tensor], strength: Tensor | float = 1.0) -> Tensor:
    """How much brighter (above 0) or darker a surface of this height is where it faces the light or turns away."""
    padded = F.pad(height[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    across, down = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2], padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    side = math.sqrt(height.shape[-1] * height.shape[-2]) / 2
    return torch.tanh(-(across * light[0] + down * light[1]) * side * strength)


def lit(image: Tensor, shade: Tensor) -> Tensor:
    """The image, brighter where shade is above 0 (white stays white) and darker below."""
    shade = shade.clamp(-0.92, 1.6)[:, None]
    return image * (1 + shade * torch.where(shade > 0, (1.4 * (1 - image)).clamp(0, 1), 1.0))


def grain_of_wood(c: Canvas, x: Tensor, y: Tensor, rings: Tensor | float = 7.0) -> tuple[Tensor, Tensor]:
    """Wood along x: the year rings in 0..1, with knots, and fine fibers around 0."""
    knot, _, a, b = cells(c, x * 0.9, y * 2.2, 0.9)
    swell = torch.exp(-((knot / (0.10 + 0.12 * a)) ** 2)) * (b < 0.45)
    bend = 0.35 * noise(c, x * 1.1, y * 1.6) + 0.10 * noise(c, x * 3, y * 4)
    phase = (y + 0.22 * bend) * rings + 1.9 * swell
    ring = (phase + 0.12 * noise(c, x * 4, y * 40)) % 1
    ring = ring * smooth(1.0, 0.86, ring)
    fibers = fractal(c, x * 7, y * 130, 3, 0.7)
    return ring * 0.75 + 0.25 * swell, fibers - 0.5 * swell


def knit(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stocking stitch, one stitch per unit square: the yarn's height in 0..1, and the stitch's column and row."""
    column = x.floor()
    across = (x - column - 0.5).abs() * 2  # 0 in the middle of a stitch, 1 at its edges
    lean = y + 0.62 * across  # the two legs of a V
    row = lean.floor()
    along = lean - row - 0.5
    u = (across - 0.5) * 2
    body = 1 - u**2 * 0.95 - (along * 1.85) ** 2
    twist = 0.12 * torch.sin((along * 1.2 + u * 0.45) * 18)
    return (body.clamp_min(0).sqrt() + twist * body.clamp(0, 1)).clamp(0, 1.1), column, row


def weave(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Plain weave, one thread per unit: the height in 0..1, and 1 where the thread across is on top."""
    over = (x.floor() + y.floor()) % 2
    u, v = x - x.floor() - 0.5, y - y.floor() - 0.5
    across = (1 - (2 * v) ** 2).clamp_min(0).sqrt() * (0.55 + 0.45 * torch.cos(u * math.pi))
    along = (1 - (2 * u) ** 2).clamp_min(0).sqrt() * (0.55 + 0.45 * torch.cos(v * math.pi))
    return torch.where(over > 0, across, along), over


def veins(c: Canvas, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Marble: clouds around 0, and sharp veins in 0..1."""
    u, v = warped(c, x, y, 0.3, 5)
    body = fractal(c, u * 1.5, v * 1.5, 6, 0.65)
    line = torch.zeros_like(body)
    for many, sharp, strength in ((1.0, 7.0, 1.0), (1.9, 9.0, 0.7), (3.6, 9.0, 0.5)):
        near = fractal(c, u * many, v * many * 1.9, 5, 0.55).abs()
        line = torch.maximum(
            line, strength * ((1 - near * sharp).clamp_min(0) + 0.35 * (1 - near * 2.2).clamp_min(0) ** 2)
        )
    return body, (line * (0.7 + 0.5 * body)).clamp(0, 1)


def warmer(image: Tensor, by: Tensor) -> Tensor:
    """Redder where `by` is above 0, bluer below."""
    return image * torch.stack((1 + 0.5 * by, torch.ones_like(by), 1 - 0.5 * by), 1)


def swell(c: Canvas, x: Tensor, y: Tensor, octaves: int = 4) -> Tensor:
    """Waves of water with sharp crests, about 0..1."""
    height, strength, total = torch.zeros_like(x + y), 1.0, 0.0
    for i in range(octaves):
        for way in (1, -1):
            u, v = x + way * c.uniform(1, 9), y + way * c.uniform(1, 9)
            u, v = (t + 1.1 * noise(c, u * 0.6, v * 0.6) for t in (u, v))
            u, v = ((1 - a.sin().abs()) * a.sin().abs() + a.cos().abs() * (1 - a.sin().abs()) for a in (u, v))
            height = height + strength * (1 - (u * v).clamp_min(1e-4) ** 0.65) ** (3.5 - 0.5 * i)
        total += 2 * strength
        strength *= 0.42
        x, y = 1.6 * x - 1.2 * y, 1.2 * x + 1.6 * y
    return height / total
