"""Many prompts, sampled plainly: the mean entropy of every scale."""

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
    prompts: list[CategorizedPrompt]
    seed: int  # of the first; the next one has the next
    conditional: np.ndarray  # [prompts, scales], nats
    guided: np.ndarray

    def about(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "seed": self.seed,
            "prompts": [p.prompt for p in self.prompts],
            "categories": [p.category for p in self.prompts],
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


def measure_band(pipe: Pipeline, prompts: Sequence[CategorizedPrompt], seed: int, **size: Any) -> Band:
    """Generate one image of every prompt, each with its own seed."""
    conditional: list[np.ndarray] = []
    guided: list[np.ndarray] = []
    with bar("entropies", len(prompts), pipe.progress_bar) as advance:
        for start in range(0, len(prompts), BATCH):
            batch = prompts[start : start + BATCH]
            scales: list[tuple[np.ndarray, np.ndarray]] = []

            def note(
                end: ScaleEnd, scales: list[tuple[np.ndarray, np.ndarray]] = scales, count: int = len(batch)
            ) -> None:
                scales.append((_mean_entropy(end.raw_logits[:count]), _mean_entropy(end.logits)))

            texts: Any = [p.prompt for p in batch]
            seeds = [seed + start + i for i in range(len(batch))]
            pipe(texts, seed=seeds, callback_on_scale_end=note, output_type="latent", **size)
            conditional.append(np.stack([c for c, _ in scales], axis=1))
            guided.append(np.stack([g for _, g in scales], axis=1))
            advance(len(batch))
    return Band(pipe.spec.name, list(prompts), seed, np.concatenate(conditional), np.concatenate(guided))


def _mean_entropy(logits: Tensor) -> np.ndarray:
    return token_entropy(logits).double().mean(1).cpu().numpy()
