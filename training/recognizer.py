"""Train a small detector that says what is where in an image, so that images can be counted right or wrong.

    python -m training.recognizer --run FOLDER --seconds 100

It is trained on painted scenes, made to look like generated ones. What it leaves in FOLDER/recognizer is what the
package ships; `training.grader` then measures how often its verdicts are right.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from nextscale.checkpoints.int8 import quantize_state
from nextscale.checkpoints.locate import ASSETS
from nextscale.models.registry import EMBEDDED
from nextscale.pipeline import Pipeline
from nextscale.research.evaluate.recognizer import POOLING, STRIDE, Detection, Recognizer, load_recognizer, stored_name
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
    make_painter,
    make_tokenizer,
    quantize,
    read_config,
)
from training.painter import Painter
from training.scenes import STYLES, Batch, Scene, Scenes, batch_of, read_vocabulary, stream, words_of

NEAR = 0.08  # how far a detection may lie from the true center, as a share of the side

OPTIONS: dict[str, Any] = {
    "widths": (48, 96, 160, 184),  # at strides 4, 8, 16, 32 of the reduced image
    "features": 120,
    "batch": 64,
    "coded": 16,  # images of a batch that go through the tokenizer, the dearest part of a step
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


def class_names(vocabulary: dict[str, Any]) -> list[str]:
    return [thing["name"] for thing in (*vocabulary["objects"], *vocabulary["shapes"])]


def build(vocabulary: dict[str, Any], options: dict[str, Any]) -> Recognizer:
    colors = [c["name"] for c in vocabulary["colours"]]
    return Recognizer(class_names(vocabulary), colors, options["widths"], options["features"])


def ship(recognizer: Recognizer, options: dict[str, Any], folder: Path) -> None:
    """As the package has it: 8 bits, and names beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {stored_name(name): p.detach().cpu().contiguous() for name, p in recognizer.named_parameters()}
    save_file(quantize_state(state), folder / "model.safetensors")
    sizes = {"widths": list(options["widths"]), "features": options["features"]}
    about = {**sizes, "classes": recognizer.classes, "colours": recognizer.colors}
    (folder / "config.json").write_text(json.dumps(about) + "\n")


def load_tokenizer(source: Path, config: dict[str, Any]) -> BSQTokenizer:
    """Of a run, or of a model as the package ships it."""
    if not (source / "tokenizer.safetensors").exists():
        return Pipeline.from_pretrained(source, progress_bar=False).tokenizer
    tokenizer = make_tokenizer(config)
    store.load_into(source, tokenizer=tokenizer)
    return tokenizer


class ImageSource:
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
        same = (self.palette[chosen][:, :, None] == batch.colors[:, None]).all(-1).any(-1)
        chosen = torch.where(same, (chosen + 5) % len(self.palette), chosen)  # or it might not be seen
        tint = torch.where((other >= first)[..., None], self.palette[chosen], 255)
        tint = torch.where(swapped[..., None], tint, batch.tint)
        moved = spoiled[..., None] * (torch.rand(*shape, 3) - 0.5)
        shift, growth = moved[..., :2] * 0.12, 1 + moved[..., 2:] * 0.3
        place = torch.cat((batch.place[..., :2] + shift, batch.place[..., 2:] * growth), dim=-1)
        return dataclasses.replace(batch, sprite=sprite, tint=tint, place=place)

    @torch.no_grad()
    def recode(self, images: Tensor, faulty: bool = True) -> Tensor:
        """Through the tokenizer, with some bits flipped and sometimes without the last scales."""
        n, scales = len(images), len(self.schedule)
        flips = until = None
        if faulty:
            flips = torch.rand(n, scales, device=self.where) * torch.rand(n, 1, device=self.where) * 0.15
            until = torch.randint(round(0.77 * scales), scales, (n,), device=self.where)
            until = torch.where(torch.rand(n, device=self.where) < 0.4, until, scales)
        with autocast(self.where):
            features = self.encode(images.contiguous(memory_format=torch.channels_last)).float()
        total = quantize(self.tokenizer, features, self.schedule, self.schedule, flips, until).total
        with autocast(self.where):
            return self.decode(total.contiguous(memory_format=torch.channels_last)).float().clamp(-1, 1)

    @torch.no_grad()
    def disturb(self, images: Tensor) -> Tensor:
        """Half of them: blur, noise and a slight shift of color. Strengths are drawn on the device."""

        def draw(low: float, high: float, channels: int = 1) -> Tensor:
            return torch.rand(len(images), channels, 1, 1, device=self.where) * (high - low) + low

        disturbed = (draw(0, 1) < 0.5).float()
        soft = F.avg_pool2d(F.avg_pool2d(images, 3, 1, 1, count_include_pad=False), 3, 1, 1, count_include_pad=False)
        made = torch.lerp(images, soft, draw(0, 1).square() * disturbed)
        made = made * (1 + disturbed * draw(-0.06, 0.06, 3)) + disturbed * draw(-0.06, 0.06, 3)
        made = made + torch.randn_like(made) * disturbed * draw(0, 1).square() * 0.12
        return made.clamp_(-1, 1)

    def make(self, batch: Batch, coded: int) -> Tensor:
        """Reduced images of a batch; the first `coded` come out of the tokenizer."""
        images = self.painter.paint(batch)
        if coded:
            images[:coded] = self.recode(images[:coded])
        made = self.disturb(F.avg_pool2d(images, POOLING))
        return made.contiguous(memory_format=torch.channels_last)


@dataclass
class Targets:
    there: Tensor  # [B, SLOTS]
    label: Tensor  # [B, SLOTS]
    color: Tensor  # [B, SLOTS]
    shape: Tensor  # [B, SLOTS] whether it is one
    cells: Tensor  # [B, SLOTS] where class and color are read
    heat: Tensor  # [B, h, w]


def targets(batch: Batch, objects: int, palette: Tensor, side: int, where: torch.device) -> Targets:
    """`side` of the maps."""
    sprite, tint, place = (t.to(where, non_blocking=True) for t in (batch.sprite, batch.tint, batch.place))
    there, shape = sprite >= 0, sprite >= len(STYLES) * objects
    label = torch.where(shape, sprite - (len(STYLES) - 1) * objects, sprite % objects)
    color = (tint[:, :, None].float() - palette.float()).square().sum(-1).argmin(-1)
    x, y, size = (place * side).unbind(-1)
    # A peak may lie one cell beside the center, so class and color are learned there too.
    near = torch.randint(-1, 2, (2, *x.shape), device=where)
    column, row = ((v.floor() + n).clamp(0, side - 1).long() for v, n in zip((x, y), near, strict=True))
    line = torch.arange(side, device=where) + 0.5
    far = (line[:, None] - y[..., None, None]).square() + (line - x[..., None, None]).square()
    heat = torch.exp(-far / (2 * (1 + 0.03 * size)[..., None, None].square())) * there[..., None, None]
    return Targets(there, torch.where(there, label, 0), color, shape, row * side + column, heat.amax(1))


def losses(heat: Tensor, what: Tensor, color: Tensor, wanted: Targets) -> Tensor:
    """Of centers (a focal loss for soft targets), objects, shapes and colors of shapes."""
    there, shape = wanted.there.float(), wanted.shape.float()
    plain = F.binary_cross_entropy_with_logits(heat, wanted.heat, reduction="none")
    centers = ((heat.sigmoid() - wanted.heat).square() * plain).sum() / there.sum().clamp_min(1)

    def named(logits: Tensor, label: Tensor, weight: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none")
        return (loss * weight.flatten()).sum() / weight.sum().clamp_min(1)

    objects, shapes = (named(what, wanted.label, weight) for weight in (there - shape, shape))
    return torch.stack((centers, objects, shapes, named(color, wanted.color, shape)))


def learning_rate(progress: float) -> float:
    return min(1.0, progress / 0.03 + 0.02) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    recognizer: Recognizer,
    source: ImageSource,
    scenes: Iterator[Batch],
    options: dict[str, Any],
    seconds: float,
    log: Log,
) -> Average:
    where, batch, base = source.where, options["batch"], options["learning_rate"]
    run: Callable[..., tuple[Tensor, Tensor, Tensor]] = recognizer
    if where.type == "cuda":
        recognizer.to(memory_format=torch.channels_last)
        run = torch.compile(recognizer, dynamic=False)
    matrices = [p for p in recognizer.parameters() if p.ndim > 1]
    others = [p for p in recognizer.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, base, betas=(0.9, 0.98), fused=True)
    average = Average([recognizer], options["average"])
    palette, weights = source.palette.to(where), torch.tensor((1.0, 1.0, 0.5, 0.5), device=where)
    side = source.painter.side // POOLING // STRIDE

    def step(progress: float | None) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if progress is None else base * learning_rate(progress)
        drawn = source.spoil(next(scenes))
        made, wanted = source.make(drawn, options["coded"]), targets(drawn, source.objects, palette, side, where)
        with autocast(where):
            heat, what, color = run(made, wanted.cells)
        loss = losses(heat.float(), what.float(), color.float(), wanted)
        optimizer.zero_grad(set_to_none=True)
        (loss * weights).sum().backward()
        nn.utils.clip_grad_norm_(recognizer.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    warm = Clock(math.inf)
    try:
        step(None)  # compiling can take as long as training, and is not counted
    except Exception as error:  # compiling saves time, and nothing needs it
        if run is recognizer:
            raise
        log(f"not compiled: {type(error).__name__}: {str(error)[:300]}")
        run = recognizer
    step(None).tolist()
    log(f"ready after {warm.elapsed:.0f} s")
    clock, done = Clock(seconds), 0
    while not clock.over:
        loss = step(clock.progress)
        average.update()
        done += 1
        if done % 100 == 0 or done in (1, 10, 30):
            numbers = zip(("centers", "objects", "shapes", "colours"), loss.tolist(), strict=True)
            rate = done * batch / clock.elapsed
            log(
                f"step {done} {clock.elapsed:.0f} s, {rate:.0f} images/s: "
                + " ".join(f"{name} {x:.3f}" for name, x in numbers)
            )
    log(f"{done} steps, {done * batch} images, {clock.elapsed:.0f} s")
    return average


@dataclass
class Errors:
    missed: int = 0
    extra: int = 0
    confused: int = 0  # another class
    discolored: int = 0

    @property
    def none(self) -> bool:
        return not any(dataclasses.astuple(self))


def compare(scene: Scene, found: list[Detection], vocabulary: dict[str, Any]) -> Errors:
    """What a recognizer got wrong of a scene that is known."""
    errors, left = Errors(), list(found)
    for item, (x, y, _) in scene.copies:
        nearest = min(left, key=lambda d: math.hypot(d.x - x, d.y - y), default=None)
        if nearest is None or math.hypot(nearest.x - x, nearest.y - y) > NEAR:
            errors.missed += 1
            continue
        left.remove(nearest)
        thing = (vocabulary["objects"] if item.color is None else vocabulary["shapes"])[item.index]
        if nearest.name != thing["name"]:
            errors.confused += 1
        elif item.color is not None and nearest.color != vocabulary["colours"][item.color]["name"]:
            errors.discolored += 1
    errors.extra = len(left)
    return errors


def measure(
    recognizer: Recognizer, source: ImageSource, vocabulary: dict[str, Any], options: dict[str, Any], log: Log
) -> dict[str, float]:
    """Share of scenes that are told exactly right: things, counts, places, colors of shapes."""
    drawer, rng = Scenes(vocabulary), np.random.default_rng(10**6 + 1)
    scenes = [drawer.draw(rng) for _ in range(options["check"])]
    lexicon, size = Lexicon(words_of(vocabulary)), options["coded"] or options["batch"]
    painted: list[list[Detection]] = []
    coded: list[list[Detection]] = []
    for i in range(0, len(scenes), size):
        part = scenes[i : i + size]
        # Always of one size, which is what the tokenizer was compiled for.
        shown = source.painter.paint(batch_of((part * size)[:size], vocabulary, lexicon))
        painted += recognizer.detect(shown)[: len(part)]
        coded += recognizer.detect(source.recode(shown, faulty=False))[: len(part)]
    result = {}
    for name, found in (("painted", painted), ("through the tokenizer", coded)):
        errors = [compare(s, f, vocabulary) for s, f in zip(scenes, found, strict=True)]
        things = sum(len(s.places) for s in scenes)
        # Captions without a background give white; all evaluations ask for that.
        plain = [s.background == "plain" and s.colors[0] == drawer.white for s in scenes]
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
    log, where = Log(parsed.run, "recognizer"), device()
    torch.manual_seed(config["seed"])
    vocabulary = read_vocabulary()
    painter = make_painter(parsed.sprites, config, where, parsed.smoke)
    has_own = (parsed.run / "tokenizer.safetensors").exists()
    source = parsed.init or (parsed.run if has_own else ASSETS / EMBEDDED.name)
    tokenizer = load_tokenizer(source, config).to(where).eval().requires_grad_(False)
    recognizer = build(vocabulary, options).to(where)
    log(f"{sum(p.numel() for p in recognizer.parameters()) / 1e6:.1f} M parameters")
    image_source = ImageSource(painter, tokenizer, vocabulary, config["grids"])
    scenes = stream(config["seed"] + 7, options["batch"], config["workers"], jitter=3.0)
    seconds = parsed.seconds or options["seconds"]
    average = train(recognizer, image_source, scenes, options, seconds, log)
    average.swap()
    ship(recognizer.to(memory_format=torch.contiguous_format), options, parsed.run / "recognizer")
    shipped = load_recognizer(where, parsed.run / "recognizer")  # measured as it will be used: in 8 bits
    measure(shipped, image_source, vocabulary, options, log)


if __name__ == "__main__":
    main()
