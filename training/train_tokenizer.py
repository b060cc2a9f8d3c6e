"""Train the image tokenizer. Accepted only if it passes `accept`: everything later is built on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.io.images import to_pil
from nextscale.research.evaluate.psnr import psnr
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
    part,
    quantize,
    ratio_of,
    read_config,
    sheet,
)
from training.state import Training


def difference(made: Tensor, wanted: Tensor) -> Tensor:
    """Absolute, squared and edge differences on three levels of a pyramid."""
    loss = made.new_zeros(())
    for level in range(3):
        d = made - wanted
        loss = loss + d.abs().mean() + (5.0 if level == 0 else 1.0) * d.square().mean()
        loss = loss + 0.4 * (d.diff(dim=2).abs().mean() + d.diff(dim=3).abs().mean())
        made, wanted = F.avg_pool2d(made, 2), F.avg_pool2d(wanted, 2)
    return loss


def learning_rate(progress: float) -> float:
    return min(1.0, progress / 0.02) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def prepare(tokenizer: BSQTokenizer, options: dict[str, Any], where: torch.device) -> Training:
    if where.type == "cuda":
        tokenizer.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        tokenizer.parameters(), options["learning_rate"], betas=(0.9, 0.99), weight_decay=1e-4, fused=True
    )
    return Training({"tokenizer": tokenizer}, [optimizer], Average([tokenizer], options["average"]))


def painted(painter: Any, config: dict[str, Any], steps: int) -> Iterator[Tensor]:
    """Batches of images, several painted at once: that many small launches would keep a GPU waiting."""
    options = config["tokenizer"]
    stream, size = part(config, "scenes").stream, options["batch"] * options.get("painted", 1)
    for scenes in stream(config["seed"] + steps, size, config["workers"], **options["scenes"]):
        yield from painter.paint(scenes).split(options["batch"])


def train(training: Training, painter: Any, config: dict[str, Any], clock: Clock, log: Log) -> None:
    options, where = config["tokenizer"], painter.device
    batch, schedule = options["batch"], grids(config["grids"])
    tokenizer, (optimizer,), average = training.modules["tokenizer"], training.optimizers, training.average
    encoder, decoder = tokenizer.encoder, tokenizer.decoder
    if where.type == "cuda":
        encoder, decoder = torch.compile(encoder), torch.compile(decoder)
    images_drawn = painted(painter, config, training.steps)
    step = 0
    while not clock.over:
        for group in optimizer.param_groups:
            group["lr"] = options["learning_rate"] * learning_rate(clock.progress)
        images = next(images_drawn).contiguous(memory_format=torch.channels_last)
        with autocast(where):
            features = encoder(images).float()
        kind = torch.rand(batch, device=where)
        raw = kind < options["unquantized"]
        cut, n = kind > 1 - options["truncated"], len(schedule)
        until = torch.where(cut, torch.randint(round(0.6 * n), n, (batch,), device=where), n)
        flips = torch.rand(batch, len(schedule), device=where) * options["flip_rate"]
        flips *= (torch.rand(batch, 1, device=where) < options["flipped"]) & ~(raw | cut)[:, None]
        total = quantize(tokenizer, features, schedule, schedule, flips, until).total
        # Straight through; what was cut off says nothing about the encoder, and some see the features themselves.
        seen = torch.where(cut[:, None, None, None], total, features + (total - features).detach())
        seen = torch.where(raw[:, None, None, None], features, seen)
        with autocast(where):
            made = decoder(seen).float()
        commitment = (features - total).square()[~cut].mean()
        amplitude = (features.std((0, 2, 3)) - options["amplitude"]).square().mean()
        center = features.mean((0, 2, 3)).square().mean()
        loss = difference(made, images) + options["commitment"] * commitment + amplitude + 0.1 * center
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tokenizer.parameters(), 1.0)
        optimizer.step()
        average.update()
        step += 1
        if step % 200 == 0 or step == 1:
            quality = psnr(made.detach().clamp(-1, 1), images).mean()
            log(
                f"step {step} {clock.elapsed:.0f} s loss {loss.item():.4f} psnr {quality:.2f} "
                f"commitment {commitment:.4f} std {features.std():.3f}"
            )
    training.steps += step
    training.elapsed = clock.before + clock.elapsed
    log(f"{step} steps, {step * batch} images, {clock.elapsed:.0f} s")


@torch.no_grad()
def accept(tokenizer: BSQTokenizer, painter: Any, config: dict[str, Any], log: Log, folder: Path) -> bool:
    """The demands on a tokenizer, on scenes that training never drew."""
    data, rng = part(config, "scenes"), np.random.default_rng(10**6)
    vocabulary = data.read_vocabulary()
    maker, lexicon = data.Scenes(vocabulary), Lexicon(data.words_of(vocabulary))
    scenes = [maker.draw(rng) for _ in range(96 if config["side"] == 512 else 8)]
    images = painter.paint(data.batch_of(scenes, vocabulary, lexicon))
    schedule = grids(config["grids"])
    features = torch.cat([tokenizer.encode_features(p) for p in images.split(16)])
    total = quantize(tokenizer, features, schedule, schedule).total

    def quality(maps: Tensor, wanted: Tensor) -> Tensor:
        return psnr(torch.cat([tokenizer.decode(m) for m in maps.split(16)]), wanted)

    full, raw = quality(total, images), quality(features, images)
    std, rest = features.std().item(), (features - total).square().mean().sqrt().item()
    log(f"psnr {full.mean():.2f} (lowest {full.min():.2f}), from unquantized features {raw.mean():.2f}")
    log(f"feature std {std:.3f}, residual after the last scale {rest:.3f}")
    for n in range(6, len(schedule)):
        until = torch.full((len(features),), n, device=features.device)
        short = quality(quantize(tokenizer, features, schedule, schedule, until=until).total, images)
        log(f"{n} scales: psnr {short.mean():.2f}")
    made = tokenizer.decode(total[:12])
    pairs = [p for both in zip(to_pil(images[:12]), to_pil(made), strict=True) for p in both]
    titles = [t for s, q in zip(scenes[:12], full, strict=False) for t in (s.caption, f"{q:.1f} dB")]
    sheet(pairs, titles, 8).save(folder / "tokenizer.png")
    good = 0.6 <= std <= 0.9 and rest < 0.3 and raw.mean() >= full.mean()
    for kind, least in config["tokenizer"]["accept"].items():
        chosen = torch.tensor([data.kind_of(scene) == kind for scene in scenes], device=full.device)
        mean = full[chosen].mean()
        log(f"{kind}: psnr {mean:.2f} of at least {least}, {int(chosen.sum())} scenes")
        good = good and mean >= least
    ratios = config["transformer"]["scenes"].get("ratios", {})
    for ratio in (float(ratio) for ratio, share in ratios.items() if share):
        batch = data.batch_of([maker.draw(rng, ratio=ratio) for _ in range(len(scenes) // 8)], vocabulary, lexicon)
        other, row = painter.paint(batch), grids(config["grids"], ratio_of(batch))
        there = quantize(tokenizer, tokenizer.encode_features(other), row, row).total
        log(f"ratio {ratio}: psnr {quality(there, other).mean():.2f}")
    log("accepted" if good else "NOT accepted")
    return bool(good)


def main() -> None:
    options = arguments(__doc__).parse_args()
    config = read_config(options.config, options.smoke)
    log, where = Log(options.run, "tokenizer"), device()
    torch.manual_seed(config["seed"])
    painter = make_painter(options.sprites, config, where, options.smoke)
    tokenizer = make_tokenizer(config)
    if options.init:
        store.load_into(options.init, tokenizer=tokenizer)
    tokenizer.to(where)
    training = prepare(tokenizer, config["tokenizer"], where)
    if options.resume:
        training.load(options.resume)
    total = max(config["tokenizer"]["seconds"], training.elapsed + (options.seconds or 0))
    clock = Clock(options.seconds or total - training.elapsed, training.elapsed, total)
    torch.manual_seed(config["seed"] + training.steps)
    train(training, painter, config, clock, log)
    tokenizer.to(memory_format=torch.contiguous_format)
    training.save(options.run / "tokenizer-state")
    training.average.swap()
    store.save(options.run, tokenizer=tokenizer)
    accept(tokenizer, painter, config, log, options.run)


if __name__ == "__main__":
    main()
