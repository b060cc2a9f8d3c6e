"""Places with texture everywhere, each different with its seed: pictures of meadows, seas, walls, cloths."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from training.textured.noise import (
    LATTICE,
    Canvas,
    at,
    blades,
    cells,
    dabs,
    fractal,
    grain_of_wood,
    knit,
    lit,
    mix,
    noise,
    numbers,
    ramp,
    relief,
    smooth,
    swell,
    turn,
    veins,
    warmer,
    warped,
    weave,
)


def plain(c: Canvas, horizon: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A plain seen from a height: x and depth on it, the distance below the horizon, and 1 where it is."""
    below = c.y - horizon
    rows = below.clamp_min(c.pixel)
    far = 0.5 / (rows + 0.1)  # never so far that all detail is finer than pixels
    return c.x * far, far, rows, smooth(-c.pixel, c.pixel, below)


def dome(u: Tensor, v: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A pebble or a shell."""
    size = 0.18 + 0.3 * r
    return 1 - (u * u + (v * (1 + 0.6 * s)) ** 2) / size**2, v / size


def leaf(u: Tensor, v: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf of maple or of beech, and its veins."""
    size = 0.46 + 0.22 * r
    u, v = u / size, (v / size).abs()
    depth, rib = torch.full_like(u, -1.0), torch.full_like(u, 1.0)
    for angle, long, wide in ((0.0, 1.0, 0.30), (0.95, 0.92, 0.27), (1.95, 0.62, 0.22)):  # lobes from the stalk
        along, across = turn(u + 0.25, v, -angle)
        t = (along / long).clamp(-0.1, 1)
        lobe = wide * 2.2 * (t + 0.1).sqrt() * (1 - t) * (1 - 0.2 * (t * 5 % 1)) - across.abs()
        depth = torch.maximum(depth, lobe)
        rib = torch.where(along > 0, torch.minimum(rib, across.abs()), rib)
    t = (u * 0.5 + 0.5).clamp(0, 1)
    beech = 1.25 * t**0.7 * (1 - t) * (1 - 0.10 * ((t * 9) % 1)) - v
    side = torch.minimum(((u - v * 1.1) * 4.5 % 1) * 0.18, v)
    maple = s < 0.6
    return torch.where(maple, depth, beech) * 2.5, smooth(0.035, 0.015, torch.where(maple, rib, side))


def sky(c: Canvas, air: Tensor, cover: Tensor) -> Tensor:
    """A gradient from the first color down to the second, and clouds from dark (the third) to lit (the fourth)."""
    x, y = c.x * 1.7 + c.uniform(0, 9), c.y * 3.0
    big, fine = fractal(c, x, y, 3, 0.5), fractal(c, x * 5, y * 5, 5, 0.74)
    thick = big + 0.42 * fine
    shade = 0.62 + 0.9 * relief(big * 0.1 + fine * 0.012, c.light(), 0.5) + 0.22 * fine
    haze = smooth(-0.5, 1.4, fractal(c, c.x * 5, c.y * 18, 5, 0.78))
    base = ramp(air[:, :2], c.down * 1.4 + 0.14 * fine)
    out = mix(base, air[:, 3], 0.36 * haze)
    return mix(out, ramp(air[:, 2:4], shade), smooth(0.75 - cover, 1.35 - cover, thick))


def meadow(c: Canvas) -> Tensor:
    horizon = c.row(0.18, 0.42)
    x, z, rows, ground = plain(c, horizon)
    air = c.palette("4F9CE6 C4E4FA B4C4D6 FFFFFF", "7FB0D8 F2E8D2 D5C4B8 FFF8EA")
    hill = horizon - 0.03 - 0.05 * noise(c, c.x * 2, c.y * 0) - 0.015 * fractal(c, c.x * 14, c.y * 14, 3)
    trees = fractal(c, c.x * 30, c.y * 34, 4, 0.7)
    far = ramp(c.palette("2F5E3A 5E9450", "3C6A58 82A868"), 0.5 + 0.5 * trees)
    out = mix(sky(c, air, c.uniform(0.2, 1.0)), far, smooth(-0.004, 0.004, c.y - hill))
    grass = c.palette("173F12 3B8426 9CCB4C", "1F4312 5B8A22 C9CC55", "0F3D1E 2E8B3A 8FD46A")
    patch = fractal(c, x * 1.2, z * 1.2, 4)
    soil = ramp(grass, 0.3 + 0.16 * patch + 0.2 * fractal(c, c.x * 60, c.y * 40, 2))
    up, number = blades(c, c.x, rows, lean=c.uniform(-0.6, 0.6))
    tone = 0.08 + 0.55 * up.clamp_min(0).sqrt() + 0.36 * (number - 0.5) + 0.12 * patch
    out = mix(out, mix(soil, ramp(grass, tone), (up >= 0).float()), ground)
    petals = c.palette("FFFFFF F6C732", "E8443A 3A1A10", "F8D43A D48A10", "A66BE0 F4E070", "FFFFFF FFD23A")
    many = c.uniform(9, 14)
    depth, core, _, _ = dabs(c, c.x * many / (0.35 + rows), (rows + 0.1).log() * many, flower, 0.11)
    return mix(out, ramp(petals, core), smooth(0, 0.15, depth) * smooth(0.02, 0.06, rows) * ground)


def flower(u: Tensor, v: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Six petals, and the heart."""
    far = (u * u + v * v).sqrt() / (0.22 + 0.12 * r)
    return 0.75 + 0.25 * torch.cos(torch.atan2(v, u) * 6) - far, smooth(0.42, 0.32, far)


def forest(c: Canvas) -> Tensor:
    horizon = c.row(0.45, 0.62)
    x, z, *_ = plain(c, horizon)
    tint = c.palette("16301A 4F8A3A C6E39A", "10302C 3F7F60 B8E0C0", "33290F 8A7A2A F0DC8C")
    out = ramp(tint, 0.75 + 0.28 * fractal(c, c.x * 6, c.y * 6, 6, 0.75) - 0.3 * c.down)
    bark = c.palette("1E150F 5A4332 A08468", "1A1A18 4E4A42 9A9484")
    side = c.light()[0].sign()
    for layer, (many, wide) in enumerate(((9.0, 0.10), (5.5, 0.13), (3.0, 0.15))):
        u = c.x * many + c.uniform(0, 9) + 0.25 * noise(c, c.x * 2, c.y * 1.5)
        shift, thick = numbers(c, 2, u.floor())
        off = (u - u.floor() - 0.3 - 0.4 * shift) / (wide * (0.6 + 0.8 * thick))
        foot = horizon + (0.02, 0.06, 0.16)[layer] + 0.02 * noise(c, c.x * 20, c.y * 0)
        off = off / (1 + 0.5 * torch.exp((c.y - foot) * 18).clamp_max(1.5))
        rough = fractal(c, off * 1.6 + u.floor() * 7, c.y * 9, 5, 0.75, ridged=True)
        tone = 0.5 + 0.32 * rough + 0.35 * off * side - 0.2 * off.abs()
        haze = torch.full_like(off, (0.6, 0.32, 0.0)[layer])
        trunk = mix(ramp(bark, tone), ramp(tint, torch.full_like(off, 0.75)), haze)
        edge = 0.06 * noise(c, c.x * 30, c.y * 30)
        out = mix(out, trunk, smooth(1.05, 0.9, off.abs() + edge) * smooth(0.004, -0.004, c.y - foot))
        crown = fractal(c, c.x * many * 2, c.y * many * 2, 6, 0.72) - (c.down - 0.04 * (2 - layer)) * 9
        leaves = ramp(tint, 0.3 + 0.1 * (2 - layer) + 0.25 * fractal(c, c.x * many * 9, c.y * many * 9, 3, 0.8))
        out = mix(out, leaves, smooth(0.0, 0.25, crown))
        fern = fractal(c, c.x * many * 5, c.y * many * 5, 5, 0.75) * 0.035 + foot - 0.02 + 0.05 * shift
        under = ramp(tint, 0.25 + 0.12 * (2 - layer) + 0.3 * fractal(c, c.x * many * 8, c.y * many * 8, 3, 0.8))
        out = mix(out, under, smooth(0, 0.01, c.y - fern) * (layer < 2))
    soil = c.palette("1E1A0E 5A4A22 8FA044", "1B120B 6A4526 C08A4A", "0F1E0C 3A6424 9CC050")
    floor = ramp(soil, 0.42 + 0.3 * fractal(c, x * 5, z * 5, 6, 0.78))
    for many in (15.0, 9.0):
        depth, rib, a, b = dabs(c, x * many, z * many, leaf, 0.55)
        floor = mix(floor, lit(ramp(soil, 0.35 + 0.65 * a), 0.5 * b - 0.2 - 0.25 * rib), smooth(0, 0.2, depth))
    floor = lit(floor, smooth(0.1, 0.6, fractal(c, x * 2.2, z * 1.5, 3)) * 0.8 - 0.25)
    return mix(out, floor, smooth(0.0, 0.02, c.y - horizon - 0.03 - 0.012 * fractal(c, c.x * 30, c.y * 30, 3)))


def beach(c: Canvas) -> Tensor:
    horizon = c.row(0.12, 0.3)
    x, z, rows, ground = plain(c, horizon)
    air = c.palette("4FA6EE D4ECFA D0D8E2 FFFFFF", "6FB4E0 F8E4C4 E0C8B8 FFF4E4")
    water = c.palette("0A5A80 2FB4C4 C8F4F0", "0F4A88 2E94D0 D4F0F8")
    wave = swell(c, x * 6, z * 9)
    tone = 0.05 + 0.5 * wave + 1.1 * rows + 0.3 * relief(wave * 0.02 * (rows + 0.1), c.light(), 2.0)
    out = mix(sky(c, air, c.uniform(0.2, 0.9)), ramp(water, tone), ground)
    shore = 0.16 + 0.05 * c.uniform(0, 1) + 0.022 * noise(c, c.x * 2.5, c.y * 0) + 0.006 * noise(c, c.x * 11, c.y * 3)
    shore = shore + c.uniform(-0.12, 0.12) * c.x
    sand = c.palette("9A7A4C E2C48C FBEBC4", "8E7458 D8BC94 F8E8D0", "A87E48 EFC57E FFEAB4")
    u, v = turn(c.x / (0.35 + rows), (rows * 2.6 + 0.06).log() * 1.5, c.uniform(-0.35, 0.35))
    u, v = warped(c, u * 1.6, v * 1.6, 0.22, 2)
    fine, patch = fractal(c, c.x * 150, c.y * 130, 2, 0.8), fractal(c, u * 2, v * 2, 4)
    ripple = torch.sin(v * c.uniform(34, 46) + 1.2 * noise(c, u * 5, v * 5)) * 0.5 + 0.5
    ripple = ripple**1.3 * smooth(-0.7, 0.5, noise(c, u * 1.5, v * 1.5))
    shade = relief(ripple * 0.006, c.light(), 1.5) * smooth(0.0, 0.12, rows - shore)
    dry = lit(ramp(sand, 0.5 + 0.15 * patch + 0.12 * ripple), 0.42 * shade + 0.15 * fine)
    wet = smooth(0.07, 0.0, rows - shore)
    out = mix(out, lit(dry, -0.3 * wet), smooth(-0.003, 0.003, rows - shore) * ground)
    lace = 1 - fractal(c, c.x * 22, rows * 50, 4, 0.6).abs() * 1.7
    foam = smooth(0.035, 0.0, (rows - shore + 0.012).abs()) * smooth(0.2, 0.75, lace) * ground
    depth, _, a, _ = dabs(c, u * 6, v * 6, dome, 0.10)
    shell = lit(ramp(c.palette("7A6A5C F4E8DC", "8A5A48 F8D8C4"), 0.2 + 0.8 * a), 0.7 * depth - 0.45)
    out = mix(out, shell, smooth(0, 0.2, depth) * smooth(0.05, 0.1, rows - shore))
    return out + (0.97 - out) * (foam * 0.9)[:, None]


def snow(c: Canvas) -> Tensor:
    horizon = c.row(0.25, 0.48)
    air = c.palette("7FA6CC DCE8F2 B4C4D4 F4F8FC", "8E9CC0 F4DCD8 C4B8C8 FFF4F0")
    out = sky(c, air, c.uniform(0.4, 1.2))
    pine = c.palette("17302E 3E6660 F0F6FC", "1E2C40 4A6684 F4F6FC")
    edge = horizon + 0.03 * noise(c, c.x * 2, c.y * 0) + 0.004 * noise(c, c.x * 20, c.y * 0)
    for many, tall, haze in ((17.0, 0.12, 0.45), (9.0, 0.2, 0.1)):
        u = c.x * many + c.uniform(0, 9)
        (pick,) = numbers(c, 1, u.floor())
        top = horizon + 0.01 - tall * (0.4 + 0.7 * pick)
        along = (c.y - top) / (horizon + 0.05 - top)
        jag = 0.75 + 0.35 * (1 - (along * 6 + 0.15 * noise(c, c.x * 40, c.y * 40)) % 1)
        wide = (u - u.floor() - 0.35 - 0.3 * pick).abs() / (0.4 * along.clamp_min(0) / jag.clamp_min(0.1) + 1e-3)
        loaded = 0.5 + 0.5 * fractal(c, c.x * 45, c.y * 60, 4, 0.8) - 0.25 * wide
        tree = mix(ramp(pine, loaded), ramp(air[:, :2], torch.ones_like(u)), torch.full_like(u, haze))
        out = mix(out, tree, smooth(1.05, 0.9, wide) * (along > 0) * (along < 1))
    x, z, rows, ground = plain(c, edge)
    white = c.palette("7C9CCB C8DAF0 FCFDFF", "8E90C0 D8D6EE FFFCFA", "6C94B8 C4DCE8 FCFFFF")
    u, v = warped(c, x * 0.9, z * 1.3, 0.25, 2)
    drift, rough = fractal(c, u, v, 4, 0.5), fractal(c, x * 9, z * 9, 5, 0.7)
    slope = relief((drift * 0.07 + rough * 0.009) * (0.25 + rows), c.light(), 1.1)
    fine = fractal(c, c.x * 100, c.y * 90, 2, 0.9)
    field = ramp(white, 0.66 + 0.42 * slope + 0.07 * fine + 0.1 * drift)
    near, _, a, _ = cells(c, c.x * 60, c.y * 60)
    field = field + (smooth(0.16, 0.05, near) * (a > 0.75) * 0.25)[:, None]
    out = mix(out, field, ground)
    for many, share in ((34.0, 0.35), (15.0, 0.3), (7.0, 0.18)):
        depth, *_ = dabs(c, c.x * many, c.y * many, flake, share)
        out = out + (0.99 - out) * (smooth(0, 0.9, depth) * 0.85)[:, None]
    return out


def flake(u: Tensor, v: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A flake of snow, far off."""
    return 1 - (u * u + v * v).sqrt() / (0.10 + 0.10 * r), u


def night(c: Canvas) -> Tensor:
    x, y = turn(c.x, c.y, c.uniform(-1.2, 1.2))
    deep = c.palette("05071C 16204E", "0A0620 2A1850", "03101E 0C3050")
    u, v = warped(c, x * 1.4, y * 1.4, 0.7, 4)
    gas = fractal(c, u, v, 7, 0.66)
    band = torch.exp(-(((y + 0.15 * noise(c, x * 1.5, y * 1.5)) / c.uniform(0.16, 0.4)) ** 2))
    other = fractal(c, u * 1.3, v * 1.3, 7, 0.66)
    glow = c.palette("7A2A9E E85AA8 FFD8E8", "1E5AB8 3EC0D8 E8FAFF", "A83A4A F0904A FFF0C8")
    rare = c.palette("2A3EA8 5A8CF0", "5A1E8E B05AE0", "0E6A6A 40D0B0")
    out = ramp(deep, 0.5 + 0.5 * fractal(c, x * 3, y * 3, 7, 0.75) + 0.4 * band)
    out = out + ramp(rare, 0.5 + 0.5 * other) * (smooth(-0.1, 1.0, other) * (0.2 + 0.5 * band))[:, None]
    dust = smooth(0.0, 0.9, fractal(c, u * 2.2, v * 2.2, 5, 0.6, ridged=True)) * band
    out = out + ramp(glow, 0.05 + 0.6 * band * smooth(-0.5, 1.4, gas)) * (0.8 * smooth(-0.2, 1.4, gas) * band)[:, None]
    out = lit(out, -0.65 * dust)
    star = c.palette("FFD8B0 FFFFFF B8D4FF")
    for many, bright in ((60.0, 0.55), (26.0, 0.85), (9.0, 1.4)):
        near, _, a, b = cells(c, x * many, y * many, 0.8)
        halo = torch.exp(-(((near / many) / (0.0017 + 0.0022 * b * bright)) ** 2))
        halo = halo + 0.12 * torch.exp(-((near / 0.14) ** 2)) * (bright > 1)
        out = out + ramp(star, a + 0 * near) * (halo * bright * (0.25 + 0.75 * b * b) * (a * 7 % 1 < 0.7))[:, None]
    return out


def sea(c: Canvas) -> Tensor:
    horizon = c.row(0.06, 0.32)
    x, z, rows, ground = plain(c, horizon)
    air = c.palette("5C9CD8 DCEAF4 A8B8C8 FFFFFF", "6C86A4 C8D4DC 8896A4 E4EAEE", "7A9CD4 FCE4C8 D4B4A8 FFF0DC")
    water = c.palette(
        "06304E 0F5E8C 3FA0C0 D4F2F4",
        "05363C 14707A 4CB8B0 DCF8F0",
        "101E38 2C4C74 6C94B4 E4EEF4",
        "0A3A6E 2080B8 70C8DC E8FAFC",
    )
    size = c.uniform(3.0, 5.0)
    u, v = turn(x * size, z * size * 1.5, c.uniform(-0.4, 0.4))
    wave = swell(c, u, v, 5)
    chop = fractal(c, u * 3, v * 3, 4, 0.7)
    slope = relief((wave * 0.11 + chop * 0.007) * (rows + 0.07), c.light(), 1.5)
    body = ramp(water, 0.02 + 0.55 * wave + 0.20 * slope + 0.05 * chop + 0.10 * smooth(0.2, 0.0, rows))
    cap = smooth(0.80, 1.0, wave + 0.20 * chop + 0.06 * noise(c, x, z) + c.uniform(-0.08, 0.04))
    cap = cap * smooth(-0.5, 0.4, fractal(c, u * 4, v * 4, 3, 0.8))
    body = body + (0.96 - body) * (cap * 0.85)[:, None]
    glint = torch.exp(-(((c.x - c.uniform(-0.3, 0.3)) / (0.06 + 0.5 * rows)) ** 2)) * smooth(0.3, 1.5, chop + slope)
    glint = glint * smooth(0.1, 1.0, fractal(c, u * 9, v * 9, 3, 0.9)) * c.uniform(0, 1)
    body = mix(body, air[:, 3], glint)
    return mix(sky(c, air, c.uniform(0.3, 1.2)), body, ground)


def underwater(c: Canvas) -> Tensor:
    water = c.palette("8CE4EC 2A9CC8 0A4A86", "9CF0DC 22A4A8 0A4C66", "84CCF8 2A74CC 10306E")
    floor_at = c.row(0.62, 0.84) + 0.03 * noise(c, c.x * 2, c.y * 0)
    murk = fractal(c, c.x * 3, c.y * 5, 5, 0.6)
    out = ramp(water, 0.1 + 0.85 * c.down + 0.07 * murk)
    fan = torch.atan2(c.x - c.uniform(-0.6, 0.6), c.y + 1.0)
    rays = smooth(-0.2, 1.0, fractal(c, fan * 9, 0 * c.y + c.uniform(0, 1), 4, 0.7)) * (1 - c.down)
    out = mix(out, 0.75 * water[:, 0] + 0.25, 0.6 * rays)
    for many, strength in ((7.0, 0.22), (13.0, 0.14)):  # the surface's net of light, finer far away
        u, v = warped(c, c.x * many, c.y * many * 1.3, 0.45, 2)
        first, second, _, _ = cells(c, u, v)
        out = out + (torch.exp(-(second - first) * 9) * strength * (1.15 - c.down))[:, None]
    x, z, rows, _ = plain(c, floor_at - 0.16)
    sand = c.palette("3A7488 9CBFA8 F0F4D0", "2C5C80 84B0B4 E4F0DC")
    u, v = warped(c, x * 2.4, z * 2.4, 0.4, 2)
    first, second, _, _ = cells(c, u * 1.3, v * 1.3)
    net = torch.exp(-(second - first) * 6.5)
    ripple = torch.sin(z * 26 + 2.5 * noise(c, x * 2, z * 2))
    ground = lit(ramp(sand, 0.35 + 0.55 * net + 0.10 * fractal(c, x * 20, z * 20, 3, 0.8)), 0.13 * ripple)
    ground = mix(ground, ramp(water, torch.full_like(rows, 0.75)), 0.75 * smooth(0.34, 0.14, rows))
    out = mix(out, ground, smooth(-0.006, 0.006, c.y - floor_at))
    weed = c.palette("0E4A3A 4CA860", "3A1E5A C05A9C", "6A2A2A E8845A")
    u = c.x * 16 + c.uniform(0, 9) + 0.5 * torch.sin(c.y * c.uniform(14, 26) + 3 * noise(c, c.x * 3, c.y * 0))
    clump = noise(c, c.x * 3.0, c.y * 0)
    root, tall = numbers(c, 2, u.floor())
    high = (floor_at + 0.05 + 0.1 * root - c.y) / (0.05 + 0.34 * smooth(-0.2, 0.8, clump + tall - 0.5))
    frond = smooth(0.36, 0.26, (u - u.floor() - 0.5).abs() + 0.2 * high.clamp(0, 1)) * (high > 0) * (high < 1)
    out = mix(out, ramp(weed, high * 0.7 + 0.2 * fractal(c, c.x * 50, c.y * 50, 2)), frond * (clump > 0.1))
    for many in (9.0, 22.0):
        depth, *_ = dabs(c, c.x * many, c.y * many, bubble, 0.13)
        rim = smooth(0, 0.12, depth) * (0.25 + 0.75 * smooth(0.75, 0.1, depth))
        out = out + (rim * 0.55)[:, None] * (0.9 - out)
    return out


def bubble(u: Tensor, v: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A small round hole or bubble."""
    size = 0.10 + 0.25 * r
    return 1 - (u * u + v * v) / size**2, v


def clouds(c: Canvas) -> Tensor:
    air = c.palette("2A72CC 9CD0F4", "3A86D8 C4E4F8", "4C7CB4 B4CCE0")
    puff = c.palette("7C8CA4 BCCAD8 FFFFFF", "8890A8 D0D4DC FFFCF8", "68788C A8B8C8 F4F6F8")
    size = c.uniform(1.2, 2.2)
    out = mix(ramp(air, c.down), puff[:, 2], 0.35 * smooth(-0.5, 1.4, fractal(c, c.x * 4, c.y * 13, 6, 0.72)))
    light = c.light()
    for grow, share in ((2.2, 0.6), (1.5, 0.85), (1.0, 1.0)):
        u, v = c.x * size * grow + c.uniform(0, 9), c.y * size * grow * 1.35
        low = fractal(c, u, v, 2, 0.5)
        puffs = torch.zeros_like(low)
        for many, strength in ((2.3, 0.5), (4.9, 0.27), (10.0, 0.12), (21.0, 0.04)):
            first, *_ = cells(c, *warped(c, u * many, v * many, 0.12, 1))
            puffs = puffs + strength * (0.75 - first * first * 1.6)
        mass = low + puffs + 0.10 * fractal(c, u * 9, v * 9, 4, 0.75)
        edge = c.uniform(0.15, 0.6)
        fine = fractal(c, u * 14, v * 14, 4, 0.8)
        bulge = relief(low * 0.10 + puffs * 0.055 / grow + fine * 0.0025, light, 0.8)
        shade = 0.50 + 0.62 * bulge + 0.45 * puffs + 0.05 * fine - 0.18 * (mass - edge)
        out = mix(out, ramp(puff, shade), smooth(edge - 0.06, edge + 0.26, mass) * share)
    return out


def sunset(c: Canvas) -> Tensor:
    horizon = c.row(0.62, 0.82)
    glow = c.palette("2C2260 8E3A7E F0704A FFD27A", "1E3A6E 8A5A8C F49A5C FFE49C", "4A1A4A C03A4A F88A3A FFE07A")
    high = ((c.y + c.y.amax()) / (horizon + c.y.amax())).clamp(0, 1.2)
    out = ramp(glow, high + 0.05 * fractal(c, c.x * 3, c.y * 14, 5, 0.7))
    sun_x, sun_y = c.uniform(-0.35, 0.35), horizon - c.uniform(-0.02, 0.16)
    away = ((c.x - sun_x) ** 2 + (c.y - sun_y) ** 2).sqrt()
    out = mix(out, glow[:, 3], 0.6 * torch.exp(-away * 5))
    out = mix(out, 0.6 * glow[:, 3] + 0.4, smooth(0.062, 0.056, away))
    dark = c.palette("3A2450 9A4A70 F89060 FFF0B0", "4A3048 B05A58 FFA858 FFF4C4")
    for stretch, cover in ((1.0, 0.1), (2.2, 0.3)):
        u, v = c.x * 1.5 * stretch, (c.y - horizon) * 5 * stretch + c.uniform(-0.6, 0.6) * c.x
        low, fine = fractal(c, u, v, 3, 0.55), fractal(c, u * 5, v * 5, 5, 0.7)
        thick = low + 0.4 * fine
        below = relief(low * 0.06 + fine * 0.012, (0 * sun_x, 0 * sun_x + 1), 0.7)
        tone = 0.34 + 0.42 * below + 0.4 * torch.exp(-away * 2.6) + 0.12 * fine - 0.14 * low
        out = mix(out, ramp(dark, tone), smooth(cover - 0.35, cover + 0.7, thick) * 0.92)
    x, z, rows, ground = plain(c, horizon)
    wave = swell(c, x * 6, z * 12)
    path = torch.exp(-(((c.x - sun_x) / (0.06 + 0.35 * rows)) ** 2)) * smooth(0.35, 0.75, wave)
    water = lit(ramp(glow, 0.95 - 2.4 * rows), 1.1 * wave - 0.75)
    water = mix(water, 0.7 * glow[:, 3] + 0.3, path * 0.85)
    hill = horizon - 0.02 - 0.09 * (fractal(c, c.x * 2.2, c.y * 0, 5, 0.5) - c.uniform(-0.2, 0.5)).clamp_min(-0.2)
    land = ramp(c.palette("140C1E 5A2A48", "1A1018 6A3430"), 0.3 + 0.5 * fractal(c, c.x * 26, c.y * 40, 4, 0.75))
    return mix(mix(out, land, smooth(-0.003, 0.003, c.y - hill)), water, ground)


WOODS = ("5A3416 96602E C48C50", "6E4A28 B08050 DCB480", "3E2214 70422A 9C6844", "84582C CC9656 F0C88A")


def boards(c: Canvas, x: Tensor, y: Tensor, colors: Tensor, gap: Tensor | float = 0.012) -> tuple[Tensor, Tensor]:
    """Boards along x, one unit wide, butt-jointed; and the gaps between them."""
    row = y.floor()
    move, tone = numbers(c, 2, row)
    along = x / 5 + move
    part = along.floor()
    v = y - row
    ring, fibers = grain_of_wood(c, x * 0.55 + part * 9.7 + row * 5.3, v * 0.8 + row * 3.7 + part * 2.2, 8)
    flat = ramp(colors, 0.62 - 0.42 * ring + 0.5 * ((tone + part * 0.37) % 1 - 0.5) + 0.19 * fibers)
    edge = torch.minimum(torch.minimum(v, 1 - v), torch.minimum(along - part, 1 - along + part) * 5)
    edge = edge + 0.25 * gap * noise(c, x * 3, y * 3)
    return flat, smooth(gap, 3.0 * gap, edge) * 0.85 + 0.15


def table(c: Canvas) -> Tensor:
    back = c.row(0.12, 0.36)
    x, z, *_ = plain(c, back - 0.16)
    flat, gap = boards(c, z * c.uniform(2.2, 3.2), x * c.uniform(2.6, 4.2), c.palette(*WOODS), 0.007)
    sheen = noise(c, c.x * 2, c.y * 3)
    top = lit(flat * (0.25 + 0.75 * gap)[:, None], 0.2 * sheen + 0.5 * smooth(0.3, 0.0, c.y - back) - 0.1)
    room = c.palette("3A5A34 8AB06A E8F0B8", "4A3424 A87848 FCE0A8", "34485C 7C9CB4 E4F0F8", "5A3A3A B4847A F8DCCC")
    out = ramp(room, 0.45 + 0.3 * fractal(c, c.x * 2.5, c.y * 2.5, 2) + 0.10 * fractal(c, c.x * 30, c.y * 30, 4, 0.85))
    for many in (7.0, 5.0):
        depth, edge, a, _ = dabs(c, c.x * many, c.y * many, lamp, 0.5)
        out = mix(out, ramp(room, 0.55 + 0.45 * a), smooth(0, 0.08, depth) * (0.2 + 0.25 * edge))
    rim = smooth(0.012, 0.0, (c.y - back - 0.006).abs())
    return mix(out, lit(top, 0.35 * rim), smooth(-0.002, 0.002, c.y - back))


def planks(c: Canvas) -> Tensor:
    across = c.chance(0.5)
    x, y = c.x * (1 - across) + c.y * across, c.y * (1 - across) + c.x * across
    many = c.uniform(4.5, 8.5)
    paint = c.palette(
        "77705F A69D8B D4CDBC",
        "4A3C30 83705C B8A58C",
        "39657C 6FA3B8 BFDCE4",
        "9A9C92 D4D4CA F4F2EA",
        "5A2A1E 9A4C36 C88468",
    )
    flat, gap = boards(c, x * many, y * many, paint, 0.022)
    worn = smooth(0.5, 1.1, fractal(c, x * 9, y * 40, 4, 0.7) + 0.3 * noise(c, x * 3, y * 3))
    bare = ramp(c.palette(*WOODS), 0.5 + 0.2 * fractal(c, x * 6, y * 90, 2))
    out = mix(flat, bare, worn * 0.6)
    v = y * many - (y * many).floor()
    u = x * many / 5 * 2
    nail = ((u - u.round()) * 2.5) ** 2 + (torch.minimum((v - 0.2).abs(), (v - 0.8).abs())) ** 2
    out = lit(out * gap[:, None], -0.75 * smooth(0.0035, 0.0015, nail))
    return lit(out, 0.16 * noise(c, c.x * 1.5, c.y * 1.5))


def bricks(c: Canvas) -> Tensor:
    many = c.uniform(5.5, 10.0)
    x, y = c.x * many / 2.2 + c.uniform(0, 5), c.y * many + c.uniform(0, 5)
    wave = 0.02 * noise(c, x * 5, y * 3)
    row = (y + wave).floor()
    u, v = x + 0.5 * (row % 2) + wave * 0.4, y + wave - row
    column = u.floor()
    u = u - column
    edge = torch.minimum(torch.minimum(u, 1 - u) * 2.2, torch.minimum(v, 1 - v))
    edge = edge + 0.035 * fractal(c, x * 12, y * 6, 3, 0.7)
    brick = smooth(0.045, 0.085, edge)
    pick = noise(c, column * 7.31 + 0.5, row * 3.77) * 0.5 + noise(c, column * 5.2, row * 9.1) * 0.35
    color = c.palette(
        "5C2018 9E4430 C8745A",
        "7C5030 B88A58 E0BE90",
        "4A2A28 7E4A44 AC7C70",
        "A8A49C D8D4CC F4F0EA",
        "6A2E1C B85632 E0906A",
    )
    mortar = c.palette("8C857A C4BDB0", "5C5850 98928A")
    rough = fractal(c, c.x * 34, c.y * 34, 4, 0.75)
    stain = fractal(c, c.x * 3, c.y * 3, 4)
    out = mix(ramp(mortar, 0.5 + 0.4 * rough), ramp(color, 0.5 + 0.55 * pick + 0.13 * rough + 0.1 * stain), brick)
    height = brick * 0.012 + rough * 0.0022
    return lit(out, 0.42 * relief(height, c.light(), 1.0) + 0.1 * stain)


def stones(c: Canvas) -> Tensor:
    many = c.uniform(3.5, 6.5)
    x, y = warped(c, c.x * many, c.y * many * 1.5, 0.14, 3)
    first, second, a, b = cells(c, x, y, 0.85)
    gap = second - first
    color = c.palette("4A463E 8E877A C8C0B0", "5A4A38 A88C68 DCC49C", "3A444C 74828C B4C0C8")
    rough = fractal(c, c.x * 18, c.y * 18, 5, 0.7)
    body = smooth(0.03, 0.12, gap + 0.03 * rough)
    height = (gap.clamp_max(0.42) / 0.42) ** 0.5 * 0.035 + rough * 0.004
    rock = ramp(color, 0.5 + 0.55 * (a - 0.5) + 0.16 * rough)
    rock = warmer(rock, 0.3 * (b - 0.4))
    out = mix(ramp(color, 0.12 + 0.2 * rough), rock, body)
    moss = smooth(0.45, 0.9, fractal(c, c.x * 5, c.y * 5, 5, 0.65) + 0.35 * (1 - gap * 2.5)) * c.uniform(0, 1)
    out = mix(out, ramp(c.palette("24401A 86A84A"), 0.5 + 0.45 * fractal(c, c.x * 70, c.y * 70, 2)), moss)
    return lit(out, 0.5 * relief(height, c.light(), 0.9))


MARBLES = (
    "F4F2EE DDDBD8 8A8C92",
    "17191C 33363A E4DCC8",
    "1C4A3C 37705C D8ECDC",
    "F2DCCB DDB39C 8E4E40",
    "E9E0CC CBB894 8A6A3A",
)


def marble(c: Canvas) -> Tensor:
    x, y = turn(c.x, c.y, c.uniform(0, math.pi))
    scale = c.uniform(1.2, 2.2)
    body, line = veins(c, x * scale, y * scale)
    color = c.palette(*MARBLES, spread=0.03)
    fine = fractal(c, x * 40, y * 40, 4, 0.85)
    return lit(mix(ramp(color[:, :2], 0.4 + 0.8 * body + 0.3 * fine), color[:, 2], line * 0.9), 0.09 * fine)


def concrete(c: Canvas) -> Tensor:
    color = c.palette("77767A A8A7A6 CBC9C4", "7C766C B0A89A D4CCBC", "666C70 969CA0 BEC4C6")
    blot, fine = fractal(c, c.x * 2.4, c.y * 2.4, 7, 0.72), fractal(c, c.x * 70, c.y * 70, 3, 0.85)
    drip = fractal(c, c.x * 16, c.y * 1.2, 4, 0.6) * smooth(0.1, 1.0, c.down + 0.4 * noise(c, c.x * 5, c.y))
    pit = torch.zeros_like(blot)
    for many, share in ((16.0, 0.12), (38.0, 0.22)):
        depth, *_ = dabs(c, *warped(c, c.x * many, c.y * many, 0.3, 2), bubble, share)
        pit = torch.maximum(pit, smooth(0.0, 0.5, depth))
    first, second, *_ = cells(c, *warped(c, c.x * 1.6, c.y * 1.6, 0.35, 6))
    crack = smooth(0.016, 0.003, second - first) * smooth(0.0, 0.3, noise(c, c.x * 2, c.y * 2) + 0.1)
    size = c.uniform(0.45, 0.75)
    u, v = ((t / size + c.uniform(0, 1) + 0.5) % 1 - 0.5 for t in (c.x / 1.4, c.y))
    seam = smooth(0.008, 0.003, torch.minimum(u.abs() * 1.4, v.abs()))
    hole = smooth(0.0011, 0.0008, ((u.abs() - 0.25) * 1.4) ** 2 + (v.abs() - 0.25) ** 2)
    height = 0.0022 * fine + 0.004 * blot - 0.007 * pit - 0.010 * seam - 0.016 * hole
    out = ramp(color, 0.5 + 0.4 * blot - 0.2 * drip + 0.12 * fine)
    return lit(out, 0.36 * relief(height, c.light(), 0.8) - 0.35 * pit - 0.45 * seam - 0.6 * crack - 0.55 * hole)


CLOTHS = (
    "8E1F2A D8D0C0 1E2A44",
    "2C4A7C E0E4EC B03A3A",
    "2F6A4A E8E0C0 7A2A2A",
    "1E7A80 F4E4C4 D08A3A",
    "6A4A86 E8DCF0 2A2040",
    "566068 E0E4E8 2A2E34",
)


def cloth(c: Canvas) -> Tensor:
    u, v = turn(c.x, c.y, c.uniform(-0.5, 0.5))
    fold = fractal(c, *warped(c, u * 2.2, v * 1.4, 0.4, 2), 3, 0.45)
    u, v = u + 0.02 * fold, v + 0.03 * noise(c, u * 2, v * 2)
    many = c.uniform(46, 70)
    height, over = weave(u * many, v * many)
    color = c.palette(*CLOTHS)
    size, gingham = c.uniform(3, 6), c.chance(0.4)
    lines = [((t * size) % 1 < 0.42).float() for t in (u, v)]
    thin = [((((t * size) % 1) - 0.7).abs() < 0.045).float() for t in (u, v)]
    mine = 0.3 + 0.4 * over  # the thread on top counts more than the one below
    pick, line = (a + (b - a) * mine for a, b in (lines, thin))
    second = torch.where(gingham[:, 0] > 0, color[:, 1], color[:, 2])
    out = mix(mix(color[:, 0], second, pick), color[:, 1], line * 0.85 * (1 - gingham))
    out = mix(out, color[:, 1], 0.10 * (1 + noise(c, u * many / 2, v * 6)))
    slub = fractal(c, u * many, v * 7, 2) * over + fractal(c, u * 7, v * many, 2) * (1 - over)
    return lit(out, 0.42 * (height - 0.62) + 0.10 * slub + 0.5 * relief(fold * 0.06, c.light(), 1.0))


def knitwear(c: Canvas) -> Tensor:
    many = c.uniform(15, 24)
    u, v = turn(c.x, c.y, c.uniform(-0.25, 0.25))
    u, v = u + 0.012 * noise(c, u * 3, v * 3), v + 0.012 * noise(c, u * 3, v * 3)
    yarn, column, row = knit(u * many, v * many * 1.25)
    color = c.palette(
        "A8262E F2EADC 2A3A5C",
        "23466E E8EEF2 C84A3A",
        "2E6248 F0E8D0 C89A3A",
        "D8CDB8 8A7458 F6F0E4",
        "7A3A6A F4D8E4 3A2A4A",
        "D88A2A FFF0D0 5A3020",
    )
    period = (c.uniform(10, 20)).round()
    band = row % period
    mirror = ((column % 12) - 6).abs()
    pattern = ((band - mirror).abs() % 5 < 1.0) & (band < 8)
    stripe = (band >= period - 2).float()
    nordic = c.chance(0.6)
    out = mix(mix(color[:, 0], color[:, 1], pattern.float() * nordic), color[:, 2], stripe * c.chance(0.6))
    fuzz = fractal(c, u * 120, v * 120, 2, 0.9)
    fold = fractal(c, c.x * 1.4, c.y * 1.4, 2)
    shade = 0.62 * (yarn - 0.7) + 0.12 * fuzz + 0.4 * relief(fold * 0.05, c.light(), 1.0)
    return lit(out, shade.clamp_min(-0.8))


def paper(c: Canvas) -> Tensor:
    color = c.palette("8E8A80 FFFFFA", "94805A FAECC4", "86806C FFFAEC", "7C889C FAFDFF")
    height = torch.zeros_like(c.x)
    for many, steep in ((1.4, 0.25), (2.9, 0.4), (6.0, 0.45), (12.0, 0.3)):  # crumpled: slopes between sharp creases
        first, *_ = cells(c, *warped(c, c.x * many, c.y * many * c.uniform(0.7, 1.4), 0.12, 3))
        height = height + first * steep / many
    fiber = fractal(c, c.x * 45, c.y * 80, 3, 0.85)
    fold = relief(height, c.light(), c.uniform(0.5, 0.9))
    out = ramp(color, 0.65 + 0.42 * fold + 0.09 * fiber)
    gap, ruled, margin = c.uniform(0.05, 0.075), c.chance(0.5), c.uniform(-0.4, -0.25)
    line = smooth(0.0024, 0.0008, (((c.y + 0.004 * fold) / gap) % 1 - 0.5).abs() * gap)
    ink = c.palette("6C9CC8 D86060", "8CA0B4 E08080")
    out = mix(out, ink[:, 0], line * ruled * 0.7)
    return mix(out, ink[:, 1], smooth(0.003, 0.0012, (c.x + 0.004 * fold - margin).abs()) * ruled * 0.7)


def carpet(c: Canvas) -> Tensor:
    x, y = turn(c.x, c.y, c.uniform(-0.08, 0.08))
    x, y = x + 0.006 * noise(c, x * 5, y * 5), y + 0.006 * noise(c, x * 5, y * 5)
    knots = c.uniform(85, 110)
    i, j = (x * knots).floor(), (y * knots).floor()
    color = c.palette(
        "7A1A1E 1E2C50 E0C48C C06A3A",
        "1E2E58 8A2226 E8D4A8 5A8A8A",
        "5A3018 C89A58 28484A F0E0C0",
        "24503E C8A04A 7A2424 F0E4C8",
        "6E2440 2E5A5E E8C8A0 B06A50",
    )
    size = c.uniform(1.8, 3.0)
    p, q = ((t / knots * size + 0.5) % 1 - 0.5 for t in (i + 0.5, j + 0.5))
    p, q = torch.maximum(p.abs(), q.abs()), torch.minimum(p.abs(), q.abs())  # eightfold: a medallion in every square
    ornament = noise(c, p * 9, q * 9) + 0.6 * noise(c, p * 18, q * 18)
    ring = torch.cos((p + 0.35 * q) * c.uniform(28, 46))
    out = mix(color[:, 0], color[:, 1], smooth(0.14, 0.24, ornament + 0.3 * ring))
    out = mix(out, color[:, 2], smooth(0.13, 0.08, (ornament - 0.2 + 0.3 * ring).abs()) * 0.85)
    out = mix(out, color[:, 3], smooth(0.55, 0.62, ring - 0.4 * ornament) * 0.8)
    band = torch.maximum(c.x.abs() / c.x.amax(), c.y.abs() / c.y.amax())  # a border, and stripes in it
    border = ramp(color, 0.5 + 0.5 * torch.sin(band * 90)) * 0.9
    out = mix(out, border, smooth(0.80, 0.805, band) * c.chance(0.5))
    (tone,) = at(c.rand(1, LATTICE, LATTICE), i, j)
    rib = (y * knots * math.pi).sin().abs()
    tuft = fractal(c, x * 150, y * 60, 2, 0.9) + 0.7 * fractal(c, x * 40, y * 40, 3, 0.8)
    return lit(out, 0.2 * (tone - 0.5) + 0.2 * (rib - 0.7) + 0.11 * tuft + 0.18 * fractal(c, c.x * 3, c.y * 3, 4))


def tiles(c: Canvas) -> Tensor:
    many = c.uniform(3.5, 6.5)
    x, y = turn(c.x * many, c.y * many, c.chance(0.3) * math.pi / 4)
    x, y = x + c.uniform(0, 1), y + c.uniform(0, 1)
    i, j = x.floor(), y.floor()
    u, v = x - i - 0.5, y - j - 0.5
    edge = 0.5 - torch.maximum(u.abs(), v.abs())
    color = c.palette("E4ECF0 2A5A9C 7AA8D8", "F4EEDC 2E7A6A E0A83A", "ECE0D0 A04A34 3A4A5A", "DCE8E4 3A8C9C 88C8C8")
    p, q = torch.maximum(u.abs(), v.abs()), torch.minimum(u.abs(), v.abs())
    petal = noise(c, p * 6, q * 6) + 0.5 * torch.cos((p * p + q * q).sqrt() * c.uniform(16, 34))
    painted = mix(color[:, 0], color[:, 1], smooth(0.06, 0.2, petal) * 0.9)
    painted = mix(painted, color[:, 2], smooth(0.12, 0.05, (petal + 0.25).abs()))
    body = mix(mix(color[:, 0], color[:, 2], (i + j) % 2), painted, c.chance(0.6) + 0 * u)
    glaze = fractal(c, c.x * 8 + i * 3.1, c.y * 8 + j * 1.7, 6, 0.75)
    first, second, *_ = cells(c, *warped(c, c.x * 30 + i * 5.3, c.y * 30 + j * 2.9, 0.3, 2))
    craze = smooth(0.10, 0.02, second - first)  # hair cracks in the glaze
    pick = noise(c, i * 5.3 + 0.5, j * 7.7 + 0.5)
    grout = ramp(c.palette("6A6660 B0ACA4", "9A968E DCD8D0"), 0.5 + 0.4 * fractal(c, c.x * 70, c.y * 70, 2))
    height = smooth(0.015, 0.075, edge) * 0.016 + glaze * 0.0014
    gloss = 0.3 * smooth(0.3, 1.0, noise(c, c.x * 2.5 + i * 0.35, c.y * 2.5 + j * 0.6))
    body = lit(body, 0.14 * pick + 0.08 * glaze + gloss - 0.22 * craze)
    return lit(mix(grout, body, smooth(0.018, 0.030, edge)), 0.42 * relief(height, c.light(), 0.7))


def gravel(c: Canvas) -> Tensor:
    many = c.uniform(11, 18)
    color = c.palette("3C3A38 84807A D4CFC4", "4A3C30 9C8468 E4D0B0", "343A42 76808A CCD4DC")
    rough = fractal(c, c.x * 45, c.y * 45, 3, 0.8)
    out = ramp(color, 0.12 + 0.12 * rough)
    light = c.light()
    for scale in (2.2, 1.5, 1.0):
        x, y = warped(c, c.x * many * scale, c.y * many * scale, 0.10, 2)
        first, second, a, b = cells(c, x, y, 0.9)
        gap = second - first
        body = smooth(0.03, 0.16, gap) * (a < (1.0 if scale > 2 else 0.55))
        stone = ramp(color, 0.45 + 0.75 * (b - 0.5) + 0.10 * rough)
        stone = warmer(stone, 0.3 * (a * 9 % 1 - 0.5))
        shade = 0.45 * relief(gap.clamp_max(0.5) * 0.055 / scale, light, 0.8) - 0.25 * smooth(0.3, 0.0, gap)
        out = mix(lit(out, -0.35 * (a < 0.55) * (scale < 2)), lit(stone, shade + 0.1 * rough), body)
    return out


def leaves(c: Canvas) -> Tensor:
    out = ramp(c.palette("1E140C 5A4026"), 0.5 + 0.4 * fractal(c, c.x * 30, c.y * 30, 4, 0.75))
    fall = c.palette("8E1408 D83A0C F5820F FCC824", "7A3208 D2700C F0A818 F2CC30", "6A0F0A B82410 E8701A D8A020")
    many, light = c.uniform(3.0, 5.0), c.light()
    spots = fractal(c, c.x * 30, c.y * 30, 4, 0.8)
    for scale in (1.6, 1.3, 1.1, 1.0):
        depth, rib, a, b = dabs(c, *warped(c, c.x * many * scale, c.y * many * scale, 0.06, 2), leaf)
        shade = 0.35 * relief(depth.clamp_max(0.5) * 0.05, light, 1.0) + 0.3 * (b * 5 % 1 - 0.5)
        body = lit(ramp(fall, a + 0.14 * spots), shade + 0.10 * spots - 0.2 * rib - 0.35 * smooth(0.14, 0.0, depth))
        out = mix(lit(out, -0.14 * smooth(-0.4, 0.0, depth)), body, smooth(0, 0.06, depth))
    return lit(out, 0.15 * noise(c, c.x * 2, c.y * 2) + 0.2)


def rain(c: Canvas) -> Tensor:
    dusk = c.palette("1A2438 3C5070 8098B0", "26363A 5C7A78 B4C8C0", "241A34 54407A 9A80B4")
    lamps = c.palette("FFC46A FF6A3A FFF0C8 6ABCFF", "F4E07A 5AE0A4 FF7A90 FFFFFF")
    table = c.rand(4, 40)

    def street(x: Tensor, y: Tensor) -> Tensor:
        """What is behind the glass, out of focus."""
        view = ramp(dusk, 0.55 - 0.9 * y + 0.15 * torch.sin(x * 9 + table[:, :1, :1] * 6))
        for k in range(16):
            across, down, size, hue = (table[:, i, k, None, None] for i in range(4))
            away = ((x - (across - 0.5) * 1.5) ** 2 + (y - (down - 0.4) * 0.9) ** 2).sqrt() / (0.03 + 0.06 * size)
            glow = smooth(1.12, 0.88, away) * (0.45 + 0.3 * size) * (0.8 + 0.25 * away)
            view = mix(view, ramp(lamps, hue), glow)
        return view

    mist = fractal(c, c.x * 60, c.y * 60, 3, 0.85)
    out = lit(street(c.x, c.y), 0.16 * mist + 0.10 * fractal(c, c.x * 12, c.y * 2, 4) - 0.05)
    zero = torch.zeros_like(table[:, :1, :1])
    for many, share, tall in ((40.0, 0.45, 1.0), (19.0, 0.4, 1.1), (8.5, 0.4, 1.2), (4.6, 0.2, 1.3)):
        depth, *_ = dabs(c, *warped(c, c.x * many, c.y * many / tall, 0.10, 2), drop, share)
        edge, thick = smooth(0, 0.25, depth), depth.clamp_min(0).sqrt() * 0.3 / many
        up, across = relief(thick, (zero, zero + 1), 0.8), relief(thick, (zero + 1, zero), 0.8)
        lens = lit(street(0.35 * c.x + 0.5 * across, 0.1 - 0.45 * up), 0.25 + 0.35 * up - 0.5 * smooth(0.5, 0, depth))
        glint = smooth(0.55, 0.85, relief(thick, (zero - 0.6, zero - 0.8), 0.8)) * smooth(0.15, 0.4, depth)
        out = mix(out, lens + 0.6 * (1 - lens) * glint[:, None], edge)
    return out


def drop(u: Tensor, v: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A drop of water."""
    size = 0.14 + 0.32 * r
    return 1 - (u * u + v * v * (0.8 + 0.3 * s)) / size**2, v


def desert(c: Canvas) -> Tensor:
    air = c.palette("3E8CD4 F0E0C0 E8D4C0 FFF8EC", "6AA8DC F8E8CC F0D8C0 FFFFFF", "E08A5A FCDCA0 F0B890 FFF0D0")
    out = sky(c, air, c.uniform(0.0, 0.6))
    sand = c.palette("5E3018 C07C38 F8C880", "704024 D09050 FFE0A8", "58241A B45828 F4A868")
    left = c.chance(0.5) * 2 - 1
    grain = fractal(c, c.x * 140, c.y * 130, 2, 0.9)
    start = c.row(0.2, 0.36)
    for layer in range(4):
        share = layer / 3
        crest = start + share * c.uniform(0.38, 0.48)
        u = c.x * (2.4 - 1.4 * share) + c.uniform(0, 9)
        ridge = crest - (0.05 + 0.12 * share) * noise(c, u, c.y * 0) - 0.02 * noise(c, u * 3, c.y * 0)
        below = c.y - ridge
        bend = c.x * (2.6 - 1.4 * share) + left * below * c.uniform(2.0, 4.0) + 0.5 * noise(c, c.x * 2, below * 5)
        phase = (bend + c.uniform(0, 9)) % 1  # each dune: a long bright side, then a short dark one
        dark = smooth(0.62, 0.65, phase) * smooth(1.0, 0.8, phase)
        u, v = warped(c, c.x * 5, below * (24 - 13 * share), 0.35, 2)
        ripple = torch.sin(v * 9 + u * 5 * left) * (1 - 0.7 * dark) * (0.35 + 0.65 * share)
        soft = fractal(c, c.x * 7, below * 18, 5, 0.7)
        tone = 0.52 + 0.22 * phase - 0.5 * dark + 0.10 * ripple + 0.14 * grain + 0.11 * soft - 0.25 * below
        body = mix(ramp(sand, tone), air[:, 1], torch.full_like(below, 0.45 * (1 - share)))
        out = mix(out, body, smooth(-0.002, 0.002, below))
    return out


def lamp(u: Tensor, v: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A light out of focus, brighter at its edge."""
    far = (u * u + v * v).sqrt() / (0.2 + 0.28 * r)
    return 1 - far, far


PLACES: dict[str, Callable[[Canvas], Tensor]] = {
    "meadow": meadow,
    "forest": forest,
    "beach": beach,
    "snow": snow,
    "night": night,
    "sea": sea,
    "underwater": underwater,
    "clouds": clouds,
    "sunset": sunset,
    "table": table,
    "planks": planks,
    "bricks": bricks,
    "stones": stones,
    "marble": marble,
    "concrete": concrete,
    "cloth": cloth,
    "knitwear": knitwear,
    "paper": paper,
    "carpet": carpet,
    "tiles": tiles,
    "gravel": gravel,
    "leaves": leaves,
    "rain": rain,
    "desert": desert,
}


def draw_place(name: str, count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Pictures of a place, [count, 3, height, width] in 0..1, on the generator's device."""
    c = Canvas.of(count, height, width, generator)
    out = PLACES[name](c).clamp(0, 1)
    light = c.uniform(-0.14, 0.14) + c.uniform(-0.25, 0.25) * c.x + c.uniform(-0.1, 0.1) * c.y
    out = lit(out, light) * (1 + (c.rand(3, 1, 1) - 0.5) * 0.04)
    return torch.where(c.rand(1, 1, 1) < 0.5, out.flip(-1), out).clamp(0, 1)
