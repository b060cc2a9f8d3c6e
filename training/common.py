"""What both trainings share: configuration, clock, averaged weights, quantization with flipped bits, sheets."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor, nn

from nextscale.engine.schedule import Schedule, infinity_schedule
from nextscale.tokenizers.bsq import BSQConfig, BSQTokenizer

HERE = Path(__file__).parent


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {k: merged(base[k], v) if isinstance(v, dict) and k in base else v for k, v in changes.items()}
    return {**base, **both}


def read_config(path: Path, smoke: bool) -> dict[str, Any]:
    config = json.loads(path.read_text())
    if "base" in config:  # a later attempt says only what it does differently
        config = merged(json.loads((path.parent / config.pop("base")).read_text()), config)
    small = config.pop("smoke")
    return merged(config, small) if smoke else config


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, default=HERE / "config.json")
    parser.add_argument("--sprites", type=Path, default=HERE / "data" / "sprites")
    parser.add_argument("--run", type=Path, default=HERE / "runs" / "latest", help="folder of weights, log and sheets")
    parser.add_argument("--init", type=Path, help="weights to start from: a folder of a run, or the shipped model")
    parser.add_argument("--resume", type=Path, help="state of another run to go on from: the folder of its parts")
    parser.add_argument("--seconds", type=float, help="instead of the configured time")
    parser.add_argument("--smoke", action="store_true", help="tiny model, a few seconds on a CPU")
    return parser


def part(config: dict[str, Any], name: str) -> ModuleType:
    """`scenes`, `painter` or `prompts` of the data that a configuration names."""
    package = "training.textured" if config.get("data") == "textured" else "training"
    return importlib.import_module(f"{package}.{name}")


def make_tokenizer(config: dict[str, Any]) -> BSQTokenizer:
    shape = config["tokenizer"]["model"]
    return BSQTokenizer(BSQConfig(**{**shape, "multipliers": tuple(shape["multipliers"])}))


def make_painter(folder: Path, config: dict[str, Any], where: torch.device, smoke: bool) -> Any:
    painter, vocabulary = part(config, "painter"), part(config, "scenes").read_vocabulary()
    missing = smoke and not folder.exists()
    sprites = painter.stand_ins(vocabulary) if missing else painter.load_sprites(folder, vocabulary)
    return painter.Painter(sprites, where, config["side"], **config.get("painter", {}))


def device() -> torch.device:
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        return torch.device("cuda")
    return torch.device("cpu")


def autocast(where: torch.device) -> torch.autocast:
    """bfloat16 on a GPU; a CPU is faster without."""
    return torch.autocast(where.type, torch.bfloat16, enabled=where.type == "cuda")


def grids(count: int, ratio: float = 1.0) -> Schedule:
    """The first grids of the row of a ratio (height / width), with positions in the frame of the whole row."""
    row = infinity_schedule(ratio, "1M")
    return Schedule(row.grids[:count], frame=row.frame)


def ratio_of(batch: Any) -> float:
    return getattr(batch, "ratio", 1.0)  # the scenes of the shipped model are square


class Clock:
    """Training is measured in seconds, because GPU time is what is short. `part` of a longer plan can be given."""

    def __init__(self, seconds: float, before: float = 0.0, total: float | None = None) -> None:
        self.started, self.seconds, self.before = time.perf_counter(), seconds, before
        self.total = total or before + seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def over(self) -> bool:
        return self.elapsed >= self.seconds

    @property
    def progress(self) -> float:
        """0 at the start of the plan, 1 at its end."""
        return min(1.0, (self.before + self.elapsed) / self.total)


class Average:
    """Exponential average of weights; young averages forget faster."""

    def __init__(self, modules: Sequence[nn.Module], decay: float) -> None:
        self.live = [p for m in modules for p in m.parameters()]
        self.slow = [p.detach().clone() for p in self.live]
        self.decay, self.steps = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.slow, self.live, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """The average into the modules, and their weights into the average; a second call undoes it."""
        for slow, live in zip(self.slow, self.live, strict=True):
            kept = live.detach().clone()
            live.copy_(slow)
            slow.copy_(kept)


@dataclass
class Quantized:
    labels: list[Tensor]  # per scale: the right bits [B, N, d], given what was written before
    inputs: list[Tensor | None]  # per scale: what the transformer is told of the map so far
    total: Tensor  # the map after the last scale


@torch.no_grad()
def quantize(
    tokenizer: BSQTokenizer,
    features: Tensor,
    schedule: Schedule,
    whole: Schedule,
    flips: Tensor | None = None,
    until: Tensor | None = None,
) -> Quantized:
    """All scales of `schedule`, a prefix of `whole`; `flips` [B, scales] are rates of wrongly written bits.

    Labels repair the wrong bits of earlier scales, which is how the model learns to correct itself (Infinity's
    bitwise self-correction). `until` [B] leaves out the later scales of an image.
    """
    rest, total = features, torch.zeros_like(features)
    result = Quantized([], [], total)
    for scale in schedule:
        result.inputs.append(tokenizer.inputs(total, scale) if scale.index else None)
        tokens = tokenizer.quantize(rest, scale)
        result.labels.append(tokens)
        if flips is not None:
            wrong = torch.rand(tokens.shape, device=tokens.device) < flips[:, scale.index, None, None]
            tokens = tokens ^ wrong.to(tokens.dtype)
        step = tokenizer.upsample_codes(tokenizer.codes(tokens), scale, whole)
        if until is not None:
            step = step * (until > scale.index)[:, None, None, None]
        rest, total = rest - step, total + step
    result.total = total
    return result


class Log:
    """Lines to the screen and to the run's folder."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.log"

    def __call__(self, text: str) -> None:
        print(text, flush=True)
        with self.path.open("a") as file:
            file.write(text + "\n")


def sheet(images: Iterable[Image.Image], titles: Sequence[str], columns: int, side: int = 192) -> Image.Image:
    """Images in rows with their captions under them."""
    shown = list(images)
    rows = -(-len(shown) // columns)
    page = Image.new("RGB", (columns * side, rows * (side + 30)), (20, 20, 20))
    draw = ImageDraw.Draw(page)
    for i, (image, title) in enumerate(zip(shown, titles, strict=True)):
        x, y = i % columns * side, i // columns * (side + 30)
        shrunk = ImageOps.contain(image, (side, side), Image.Resampling.LANCZOS)
        page.paste(shrunk, (x + (side - shrunk.width) // 2, y + (side - shrunk.height) // 2))
        words, lines = title.split(), [""]
        for word in words:
            if len(lines[-1]) + len(word) > side // 6:
                lines.append("")
            lines[-1] += f" {word}"
        draw.multiline_text((x + 2, y + side + 2), "\n".join(line.strip() for line in lines[:2]), fill=(235, 235, 235))
    return page
