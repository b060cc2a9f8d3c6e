"""Train a small detector that says what is where in a picture, so that pictures can be counted right or wrong.

    python -m training.recogniser --run FOLDER --seconds 100

It is trained on painted scenes, made to look like generated ones, and tells which thing stands where (a heat map of
centres), and for shapes in which colour. Styles are not told apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.checkpoints.locate import ASSETS
from nextscale.models.registry import EMBEDDED
from nextscale.pipeline import Pipeline
from nextscale.text.words import Lexicon
from nextscale.tokenizers.bsq import BSQTokenizer
from training import store
from training.common import (
    Average,
    Clock,
    Log,
    arguments,
    autocast,
    device,
    grids,
    make_tokenizer,
    quantise,
    read_config,
)
from training.painter import Painter, load_sprites
from training.scenes import STYLES, Batch, Scene, Scenes, batch_of, read_vocabulary, stream, words_of

REDUCED = 2  # pixels per side that become one before anything else
STRIDE = 8  # of the maps, in reduced pixels
THRESHOLD = 0.4  # of the heat map: a centre that is well seen has 0.8 or more
APART = 0.1  # centres that are nearer, as a share of the side, are one thing
MOST = 16  # detections per picture
NEAR = 0.08  # how far a detection may lie from the true centre, as a share of the side

OPTIONS: dict[str, Any] = {
    "widths": (48, 96, 192, 224),  # at strides 4, 8, 16, 32 of the reduced picture
    "features": 128,
    "batch": 64,
    "coded": 16,  # pictures of a batch that go through the tokenizer, the dearest part of a step
    "learning_rate": 0.0015,
    "average": 0.995,
    "seconds": 200,
    "check": 512,  # scenes that measure it
}
SMOKE: dict[str, Any] = {
    **OPTIONS,
    "widths": (8, 16, 24, 24),
    "features": 24,
    "batch": 8,
    "coded": 2,
    "seconds": 3,
    "check": 8,
}


@dataclass(frozen=True)
class Detection:
    label: int  # among the objects, then the shapes
    colour: int  # means something for shapes only
    x: float  # of the centre, as shares of the side
    y: float
    score: float  # that something is there
    sure: float  # that it is this thing


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # No batch norm: `store` keeps parameters only, and pictures must not depend on their company.
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


def outlines(pictures: Tensor) -> Tensor:
    """Edges across and down [B, 2, H, W], whatever the colours on their two sides.

    A shape has nothing else, and without them the net knew its colour long before it left chance at naming it.
    """
    across = F.pad(pictures.diff(dim=3), (0, 1, 0, 0)).abs().amax(1, keepdim=True)
    down = F.pad(pictures.diff(dim=2), (0, 0, 0, 1)).abs().amax(1, keepdim=True)
    return torch.cat((across, down), dim=1).add(1e-3).sqrt()  # a faint edge is an edge too


class Recogniser(nn.Module):
    """Down to stride 32, where one cell sees the largest object whole, and up again to where centres are told."""

    def __init__(self, classes: int, colours: int, widths: tuple[int, int, int, int], features: int) -> None:
        super().__init__()
        self.classes = classes
        a, b, c, d = widths
        self.stem = nn.Sequential(
            nn.Conv2d(5, a, 5, stride=2, padding=2), nn.SiLU(), nn.Conv2d(a, a, 3, stride=2, padding=1), Residual(a)
        )

        def down(small: int, large: int) -> nn.Sequential:
            enter = (nn.GroupNorm(8, small), nn.SiLU(), nn.Conv2d(small, large, 3, stride=2, padding=1))
            return nn.Sequential(*enter, Residual(large), Residual(large))

        self.down8, self.down16, self.down32 = down(a, b), down(b, c), down(c, d)
        self.up16, self.mix16 = nn.Conv2d(d, c, 1), Residual(c)
        self.up8, self.side8, self.mix8 = nn.Conv2d(c, features, 1), nn.Conv2d(b, features, 1), Residual(features)
        self.norm = nn.GroupNorm(8, features)
        self.heat = nn.Conv2d(features, 1, 3, padding=1)
        self.what = nn.Sequential(nn.Linear(features, 2 * features), nn.SiLU(), nn.Linear(2 * features, classes))
        self.colour = nn.Linear(features, colours)
        nn.init.constant_(self.heat.bias, -4.0)  # nearly all cells are empty

    def maps(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Reduced pictures [B, 3, H, W] in [-1, 1] -> logits of centres [B, h, w] and features [B, C, h, w]."""
        at8 = self.down8(self.stem(torch.cat((pictures, outlines(pictures)), dim=1)))
        at16 = self.down16(at8)
        up = F.interpolate(self.up16(self.down32(at16)), scale_factor=2.0, mode="nearest")
        up = F.interpolate(self.up8(self.mix16(at16 + up)), scale_factor=2.0, mode="nearest")
        features = F.silu(self.norm(self.mix8(self.side8(at8) + up)))
        return self.heat(features)[:, 0], features

    def read(self, features: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of class [B, K, classes] and colour [B, K, colours] at the cells [B, K]."""
        chosen = features.flatten(2).gather(2, cells[:, None].expand(-1, features.shape[1], -1)).transpose(1, 2)
        return self.what(chosen), self.colour(chosen)

    def forward(self, pictures: Tensor, cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heat, features = self.maps(pictures)
        return heat, *self.read(features, cells)

    @torch.no_grad()
    def detect(self, pictures: Tensor, at_once: int = 64) -> list[list[Detection]]:
        """Of every picture [B, 3, H, W] in [-1, 1], at full size; the best seen first."""
        return [found for part in pictures.split(at_once) for found in self._detect(part)]

    def _detect(self, pictures: Tensor) -> list[list[Detection]]:
        heat, features = self.maps(F.avg_pool2d(pictures, REDUCED))
        h, w = heat.shape[1:]
        score = heat.float().sigmoid()
        peak = score * (score == F.max_pool2d(score[:, None], 5, 1, 2)[:, 0])
        best, cells = peak.flatten(1).topk(min(MOST, h * w))
        what, colour = self.read(features, cells)
        sure, label = what.float().softmax(-1).max(-1)
        rows = zip(*(t.tolist() for t in (best, cells, label, sure, colour.argmax(-1))), strict=True)
        return [self._distinct(list(zip(*row, strict=True)), h, w) for row in rows]

    @staticmethod
    def _distinct(candidates: list[tuple[float, int, int, float, int]], h: int, w: int) -> list[Detection]:
        kept: list[Detection] = []
        for score, cell, label, sure, colour in candidates:
            x, y = (cell % w + 0.5) / w, (cell // w + 0.5) / h
            if score >= THRESHOLD and all(math.hypot(x - k.x, y - k.y) >= APART for k in kept):
                kept.append(Detection(label, colour, x, y, score, sure))
        return kept


def class_names(vocabulary: dict[str, Any]) -> list[str]:
    return [thing["name"] for thing in (*vocabulary["objects"], *vocabulary["shapes"])]


def build(vocabulary: dict[str, Any], options: dict[str, Any]) -> Recogniser:
    names, colours = class_names(vocabulary), vocabulary["colours"]
    return Recogniser(len(names), len(colours), options["widths"], options["features"])


def load(folder: Path, vocabulary: dict[str, Any], smoke: bool, where: torch.device) -> Recogniser:
    if not (folder / "recogniser.safetensors").exists():
        raise SystemExit(f"{folder} has no recogniser: run python -m training.recogniser --run {folder}")
    recogniser = build(vocabulary, SMOKE if smoke else OPTIONS)
    store.load_into(folder, recogniser=recogniser)
    return recogniser.to(where).eval().requires_grad_(False)


def load_tokenizer(source: Path, config: dict[str, Any]) -> BSQTokenizer:
    """Of a run, or of a model as the package ships it."""
    if not (source / "tokenizer.safetensors").exists():
        return Pipeline.from_pretrained(source, progress_bar=False).tokenizer
    tokenizer = make_tokenizer(config)
    store.load_into(source, tokenizer=tokenizer)
    return tokenizer


class Pictures:
    """Scenes as a generator would draw them, with its faults: things that are missing, wrong or out of place."""

    def __init__(self, painter: Painter, tokenizer: BSQTokenizer, vocabulary: dict[str, Any], count: int) -> None:
        self.painter, self.tokenizer, self.where = painter, tokenizer, painter.device
        self.schedule = grids(count)
        self.objects, self.sprites = len(vocabulary["objects"]), painter.mips[0].shape[0]
        self.palette = torch.tensor([c["rgb"] for c in vocabulary["colours"]], dtype=torch.uint8)
        self.encode: Callable[[Tensor], Tensor] = tokenizer.encoder
        self.decode: Callable[[Tensor], Tensor] = tokenizer.decoder
        if self.where.type == "cuda":
            tokenizer.to(memory_format=torch.channels_last)
            self.encode, self.decode = torch.compile(tokenizer.encoder), torch.compile(tokenizer.decoder)

    def spoil(self, batch: Batch) -> Batch:
        """Some scenes lose the order that captions give them, or the detector would see what it expects to see."""
        shape = batch.sprite.shape
        spoiled = (torch.rand(shape[0], 1) < 0.4) & (batch.sprite >= 0)
        first = len(STYLES) * self.objects  # of the shapes, which are few among the sprites and hard to tell
        other = torch.where(
            torch.rand(shape) < 0.25, torch.randint(first, self.sprites, shape), torch.randint(self.sprites, shape)
        )
        swapped = spoiled & (torch.rand(shape) < 0.3)
        sprite = torch.where(swapped, other, batch.sprite)
        sprite = torch.where(spoiled & (torch.rand(shape) < 0.15), -1, sprite)
        chosen = torch.randint(len(self.palette), shape)
        same = (self.palette[chosen][:, :, None] == batch.colours[:, None]).all(-1).any(-1)
        chosen = torch.where(same, (chosen + 5) % len(self.palette), chosen)  # or it might not be seen
        tint = torch.where((other >= first)[..., None], self.palette[chosen], 255)
        tint = torch.where(swapped[..., None], tint, batch.tint)
        moved = spoiled[..., None] * (torch.rand(*shape, 3) - 0.5)
        shift, growth = moved[..., :2] * 0.12, 1 + moved[..., 2:] * 0.3
        place = torch.cat((batch.place[..., :2] + shift, batch.place[..., 2:] * growth), dim=-1)
        return dataclasses.replace(batch, sprite=sprite, tint=tint, place=place)

    @torch.no_grad()
    def recode(self, pictures: Tensor, faulty: bool = True) -> Tensor:
        """Through the tokenizer, with some bits flipped and sometimes without the last scales."""
        n, scales = len(pictures), len(self.schedule)
        flips = until = None
        if faulty:
            flips = torch.rand(n, scales, device=self.where) * torch.rand(n, 1, device=self.where) * 0.15
            until = torch.randint(round(0.77 * scales), scales, (n,), device=self.where)
            until = torch.where(torch.rand(n, device=self.where) < 0.4, until, scales)
        with autocast(self.where):
            features = self.encode(pictures.contiguous(memory_format=torch.channels_last)).float()
        total = quantise(self.tokenizer, features, self.schedule, self.schedule, flips, until).total
        with autocast(self.where):
            return self.decode(total.contiguous(memory_format=torch.channels_last)).float().clamp(-1, 1)

    @torch.no_grad()
    def disturb(self, pictures: Tensor) -> Tensor:
        """Half of them: blur, noise and a slight shift of colour. Strengths are drawn on the device."""

        def draw(low: float, high: float, channels: int = 1) -> Tensor:
            return torch.rand(len(pictures), channels, 1, 1, device=self.where) * (high - low) + low

        disturbed = (draw(0, 1) < 0.5).float()
        soft = F.avg_pool2d(F.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False), 3, 1, 1, count_include_pad=False)
        made = torch.lerp(pictures, soft, draw(0, 1).square() * disturbed)
        made = made * (1 + disturbed * draw(-0.06, 0.06, 3)) + disturbed * draw(-0.06, 0.06, 3)
        made = made + torch.randn_like(made) * disturbed * draw(0, 1).square() * 0.12
        return made.clamp_(-1, 1)

    def make(self, batch: Batch, coded: int) -> Tensor:
        """Reduced pictures of a batch; the first `coded` come out of the tokenizer."""
        pictures = self.painter.paint(batch)
        if coded:
            pictures[:coded] = self.recode(pictures[:coded])
        made = self.disturb(F.avg_pool2d(pictures, REDUCED))
        return made.contiguous(memory_format=torch.channels_last)


@dataclass
class Targets:
    there: Tensor  # [B, SLOTS]
    label: Tensor  # [B, SLOTS]
    colour: Tensor  # [B, SLOTS]
    shape: Tensor  # [B, SLOTS] whether it is one
    cells: Tensor  # [B, SLOTS] where class and colour are read
    heat: Tensor  # [B, h, w]


def targets(batch: Batch, objects: int, palette: Tensor, side: int, where: torch.device) -> Targets:
    """`side` of the maps."""
    sprite, tint, place = (t.to(where, non_blocking=True) for t in (batch.sprite, batch.tint, batch.place))
    there, shape = sprite >= 0, sprite >= len(STYLES) * objects
    label = torch.where(shape, sprite - (len(STYLES) - 1) * objects, sprite % objects)
    colour = (tint[:, :, None].float() - palette.float()).square().sum(-1).argmin(-1)
    x, y, size = (place * side).unbind(-1)
    # A peak may lie one cell beside the centre, so class and colour are learned there too.
    near = torch.randint(-1, 2, (2, *x.shape), device=where)
    column, row = ((v.floor() + n).clamp(0, side - 1).long() for v, n in zip((x, y), near, strict=True))
    line = torch.arange(side, device=where) + 0.5
    far = (line[:, None] - y[..., None, None]).square() + (line - x[..., None, None]).square()
    heat = torch.exp(-far / (2 * (1 + 0.03 * size)[..., None, None].square())) * there[..., None, None]
    return Targets(there, torch.where(there, label, 0), colour, shape, row * side + column, heat.amax(1))


def losses(heat: Tensor, what: Tensor, colour: Tensor, wanted: Targets) -> Tensor:
    """Of centres (a focal loss for soft targets), objects, shapes and colours of shapes."""
    there, shape = wanted.there.float(), wanted.shape.float()
    plain = F.binary_cross_entropy_with_logits(heat, wanted.heat, reduction="none")
    centres = ((heat.sigmoid() - wanted.heat).square() * plain).sum() / there.sum().clamp_min(1)

    def named(logits: Tensor, label: Tensor, weight: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none")
        return (loss * weight.flatten()).sum() / weight.sum().clamp_min(1)

    objects, shapes = (named(what, wanted.label, weight) for weight in (there - shape, shape))
    return torch.stack((centres, objects, shapes, named(colour, wanted.colour, shape)))


def learning_rate(progress: float) -> float:
    return min(1.0, progress / 0.03 + 0.02) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    recogniser: Recogniser,
    pictures: Pictures,
    scenes: Iterator[Batch],
    options: dict[str, Any],
    seconds: float,
    log: Log,
) -> Average:
    where, batch, base = pictures.where, options["batch"], options["learning_rate"]
    run: Callable[..., tuple[Tensor, Tensor, Tensor]] = recogniser
    if where.type == "cuda":
        recogniser.to(memory_format=torch.channels_last)
        run = torch.compile(recogniser, dynamic=False)
    matrices = [p for p in recogniser.parameters() if p.ndim > 1]
    others = [p for p in recogniser.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, base, betas=(0.9, 0.98), fused=True)
    average = Average([recogniser], options["average"])
    palette, weights = pictures.palette.to(where), torch.tensor((1.0, 1.0, 0.5, 0.5), device=where)
    side = pictures.painter.side // REDUCED // STRIDE

    def step(progress: float | None) -> Tensor:
        for group in optimiser.param_groups:
            group["lr"] = 0.0 if progress is None else base * learning_rate(progress)
        drawn = pictures.spoil(next(scenes))
        made, wanted = pictures.make(drawn, options["coded"]), targets(drawn, pictures.objects, palette, side, where)
        with autocast(where):
            heat, what, colour = run(made, wanted.cells)
        loss = losses(heat.float(), what.float(), colour.float(), wanted)
        optimiser.zero_grad(set_to_none=True)
        (loss * weights).sum().backward()
        nn.utils.clip_grad_norm_(recogniser.parameters(), 1.0)
        optimiser.step()
        return loss.detach()

    warm = Clock(math.inf)
    try:
        step(None)  # compiling can take as long as training, and is not counted
    except Exception as error:  # compiling saves time, and nothing needs it
        if run is recogniser:
            raise
        log(f"not compiled: {type(error).__name__}: {str(error)[:300]}")
        run = recogniser
    step(None).tolist()
    log(f"ready after {warm.elapsed:.0f} s")
    clock, done = Clock(seconds), 0
    while not clock.over:
        loss = step(clock.progress)
        average.update()
        done += 1
        if done % 100 == 0 or done in (1, 10, 30):
            numbers = zip(("centres", "objects", "shapes", "colours"), loss.tolist(), strict=True)
            rate = done * batch / clock.elapsed
            log(
                f"step {done} {clock.elapsed:.0f} s, {rate:.0f} pictures/s: "
                + " ".join(f"{name} {x:.3f}" for name, x in numbers)
            )
    log(f"{done} steps, {done * batch} pictures, {clock.elapsed:.0f} s")
    return average


@dataclass
class Errors:
    missed: int = 0
    extra: int = 0
    confused: int = 0  # another class
    discoloured: int = 0

    @property
    def none(self) -> bool:
        return not any(dataclasses.astuple(self))


def compare(scene: Scene, found: list[Detection], objects: int) -> Errors:
    """What a recogniser got wrong of a scene that is known."""
    errors, left = Errors(), list(found)
    for item, (x, y, _) in scene.copies:
        nearest = min(left, key=lambda d: math.hypot(d.x - x, d.y - y), default=None)
        if nearest is None or math.hypot(nearest.x - x, nearest.y - y) > NEAR:
            errors.missed += 1
            continue
        left.remove(nearest)
        if nearest.label != (item.index if item.colour is None else objects + item.index):
            errors.confused += 1
        elif item.colour is not None and nearest.colour != item.colour:
            errors.discoloured += 1
    errors.extra = len(left)
    return errors


def measure(
    recogniser: Recogniser, pictures: Pictures, vocabulary: dict[str, Any], options: dict[str, Any], log: Log
) -> dict[str, float]:
    """Share of scenes that are told exactly right: things, counts, places, colours of shapes."""
    drawer, rng = Scenes(vocabulary), np.random.default_rng(10**6 + 1)
    scenes = [drawer.draw(rng) for _ in range(options["check"])]
    lexicon, size = Lexicon(words_of(vocabulary)), options["coded"] or options["batch"]
    painted: list[list[Detection]] = []
    coded: list[list[Detection]] = []
    for i in range(0, len(scenes), size):
        part = scenes[i : i + size]
        # Always of one size, which is what the tokenizer was compiled for.
        shown = pictures.painter.paint(batch_of((part * size)[:size], vocabulary, lexicon))
        painted += recogniser.detect(shown)[: len(part)]
        coded += recogniser.detect(pictures.recode(shown, faulty=False))[: len(part)]
    result = {}
    for name, found in (("painted", painted), ("through the tokenizer", coded)):
        errors = [compare(s, f, pictures.objects) for s, f in zip(scenes, found, strict=True)]
        things = sum(len(s.places) for s in scenes)
        # Captions without a background give white; all evaluations ask for that.
        plain = [s.background == "plain" and s.colours[0] == drawer.white for s in scenes]
        white = [e.none for e, is_plain in zip(errors, plain, strict=True) if is_plain]
        kinds = {f.name: sum(getattr(e, f.name) for e in errors) for f in dataclasses.fields(Errors)}
        result[name] = sum(e.none for e in errors) / len(errors)
        log(
            f"{name}: {result[name]:.1%} of {len(scenes)} scenes exactly right, "
            f"on white {sum(white) / max(1, len(white)):.1%} of {len(white)}; "
            f"of {things} things " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        )
    return result


def main() -> None:
    parsed = arguments(__doc__).parse_args()
    config, options = read_config(parsed.config, parsed.smoke), SMOKE if parsed.smoke else OPTIONS
    log, where = Log(parsed.run, "recogniser"), device()
    torch.manual_seed(config["seed"])
    vocabulary = read_vocabulary()
    sprites = load_sprites(parsed.sprites, vocabulary)
    if parsed.smoke:  # small pictures need no large sprites, whose reduction would take longest of all
        sprites = sprites[:, :, ::4, ::4].contiguous()
    painter = Painter(sprites, where, config["side"])
    has_own = (parsed.run / "tokenizer.safetensors").exists()
    source = parsed.init or (parsed.run if has_own else ASSETS / EMBEDDED.name)
    tokenizer = load_tokenizer(source, config).to(where).eval().requires_grad_(False)
    recogniser = build(vocabulary, options).to(where)
    log(f"{sum(p.numel() for p in recogniser.parameters()) / 1e6:.1f} M parameters")
    pictures = Pictures(painter, tokenizer, vocabulary, config["grids"])
    scenes = stream(config["seed"] + 7, options["batch"], config["workers"], jitter=3.0)
    seconds = parsed.seconds or options["seconds"]
    average = train(recogniser, pictures, scenes, options, seconds, log)
    average.swap()
    recogniser.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)
    store.save(parsed.run, recogniser=recogniser)
    store.load_into(parsed.run, recogniser=recogniser)  # measured as it will be used: in half precision
    measure(recogniser, pictures, vocabulary, options, log)


if __name__ == "__main__":
    main()
