"""Many prompts, sampled plainly: the mean entropy of every scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nextscale.engine.entropy import token_entropy
from nextscale.engine.loop import ScaleEnd
from nextscale.errors import NextscaleError
from nextscale.io.progress import bar
from nextscale.pipeline import Pipeline

BATCH = 4


@dataclass(frozen=True)
class Asked:
    """A line of a file of prompts."""

    prompt: str | int
    category: str = "all prompts"


@dataclass(frozen=True)
class Band:
    model: str
    asked: list[Asked]
    seed: int  # of the first; the next one has the next
    conditional: np.ndarray  # [prompts, scales], nats
    guided: np.ndarray

    def about(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "seed": self.seed,
            "prompts": [a.prompt for a in self.asked],
            "categories": [a.category for a in self.asked],
        }


def read_prompts(path: Path, labels: bool) -> list[Asked]:
    """One prompt per line, or `category<TAB>prompt`; class numbers where the model takes `labels`."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise NextscaleError(f"{path} cannot be read: {error}") from None
    if not lines:
        raise NextscaleError(f"{path} holds no prompt; write one per line, or category<TAB>prompt")
    found = []
    for number, line in enumerate(lines, start=1):
        before, tab, behind = line.partition("\t")
        category, prompt = (before.strip(), behind.strip()) if tab else (Asked.category, line.strip())
        if labels and not prompt.isdecimal():
            raise NextscaleError(f"{path}, prompt {number}: this model takes a class number, not {prompt!r}")
        if not prompt or not category:
            raise NextscaleError(f"{path}, prompt {number}: write a prompt, or category<TAB>prompt, not {line!r}")
        found.append(Asked(int(prompt) if labels else prompt, category))
    return found


def measure_band(pipe: Pipeline, asked: Sequence[Asked], seed: int, **size: Any) -> Band:
    """One picture of every prompt, each with its own seed."""
    conditional: list[np.ndarray] = []
    guided: list[np.ndarray] = []
    with bar("entropies", len(asked), pipe.progress_bar) as advance:
        for start in range(0, len(asked), BATCH):
            some = asked[start : start + BATCH]
            scales: list[tuple[np.ndarray, np.ndarray]] = []

            def note(
                end: ScaleEnd, scales: list[tuple[np.ndarray, np.ndarray]] = scales, count: int = len(some)
            ) -> None:
                scales.append((_mean(end.raw_logits[:count]), _mean(end.logits)))

            prompts: Any = [a.prompt for a in some]
            seeds = [seed + start + i for i in range(len(some))]
            pipe(prompts, seed=seeds, callback_on_scale_end=note, output_type="latent", **size)
            conditional.append(np.stack([c for c, _ in scales], axis=1))
            guided.append(np.stack([g for _, g in scales], axis=1))
            advance(len(some))
    return Band(pipe.spec.name, list(asked), seed, np.concatenate(conditional), np.concatenate(guided))


def _mean(logits: Tensor) -> np.ndarray:
    return token_entropy(logits).double().mean(1).cpu().numpy()
