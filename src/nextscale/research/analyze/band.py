"""Many images, sampled plainly: the mean entropy of every scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nextscale.engine.callback import ScaleEnd
from nextscale.engine.entropy import token_entropy
from nextscale.errors import NextscaleError
from nextscale.io.progress import bar
from nextscale.io.reading import read_lines
from nextscale.pipeline import Pipeline

BATCH = 4


@dataclass(frozen=True)
class CategorizedPrompt:
    """A line of a file of prompts."""

    prompt: str | int
    category: str = "all prompts"


@dataclass(frozen=True)
class Band:
    model: str
    prompts: list[CategorizedPrompt]  # of every image
    seeds: list[int]
    conditional: np.ndarray  # [images, scales], nats
    guided: np.ndarray

    def about(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompts": [p.prompt for p in self.prompts],
            "categories": [p.category for p in self.prompts],
            "seeds": self.seeds,
        }


def read_prompts(path: Path, labels: bool) -> list[CategorizedPrompt]:
    """Read one prompt per line, or `category<TAB>prompt`; class numbers where the model takes `labels`."""
    lines = read_lines(path, " ")
    if not lines:
        raise NextscaleError(f"{path} holds no prompt; write one per line, or category<TAB>prompt")
    found = []
    for number, line in lines:
        before, tab, behind = line.partition("\t")
        category, prompt = (before.strip(), behind.strip()) if tab else (CategorizedPrompt.category, line)
        if labels and not prompt.isdecimal():
            raise NextscaleError(f"{path}, line {number}: this model takes a class number, not {prompt!r}")
        if not prompt or not category:
            raise NextscaleError(f"{path}, line {number}: write a prompt, or category<TAB>prompt, not {line!r}")
        found.append(CategorizedPrompt(int(prompt) if labels else prompt, category))
    return found


def with_seeds(
    prompts: Sequence[CategorizedPrompt], seed: int, seeds: int = 1
) -> tuple[list[CategorizedPrompt], list[int]]:
    """The prompt and the seed of every image, one prompt after the other. No two images share a seed, and more seeds
    leave those of the first images as they are."""
    asked = [prompt for prompt in prompts for _ in range(seeds)]
    return asked, [seed + i + r * len(prompts) for i in range(len(prompts)) for r in range(seeds)]


def measure_band(pipe: Pipeline, prompts: Sequence[CategorizedPrompt], seed: int, seeds: int = 1, **size: Any) -> Band:
    """Generate images of every prompt, as many as there are seeds, each with its own."""
    conditional: list[np.ndarray] = []
    guided: list[np.ndarray] = []
    asked, own = with_seeds(prompts, seed, seeds)
    with bar("entropies", len(asked), pipe.progress_bar) as advance:
        for start in range(0, len(asked), BATCH):
            batch = asked[start : start + BATCH]
            scales: list[tuple[np.ndarray, np.ndarray]] = []

            def note(
                end: ScaleEnd, scales: list[tuple[np.ndarray, np.ndarray]] = scales, count: int = len(batch)
            ) -> None:
                scales.append((_mean_entropy(end.raw_logits[:count]), _mean_entropy(end.logits)))

            texts: Any = [p.prompt for p in batch]
            pipe(texts, seed=own[start : start + BATCH], callback_on_scale_end=note, output_type="latent", **size)
            conditional.append(np.stack([c for c, _ in scales], axis=1))
            guided.append(np.stack([g for _, g in scales], axis=1))
            advance(len(batch))
    return Band(pipe.spec.name, asked, own, np.concatenate(conditional), np.concatenate(guided))


def _mean_entropy(logits: Tensor) -> np.ndarray:
    return token_entropy(logits).double().mean(1).cpu().numpy()
