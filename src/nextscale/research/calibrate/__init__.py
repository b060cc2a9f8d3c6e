"""Fit the settings that a paper leaves to the model at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nextscale.cluster.workers import Workers
from nextscale.errors import NextscaleError
from nextscale.pipeline import Pipeline
from nextscale.research.prompt_checks import bad_prompts

MIN_PROMPTS = 64
BATCH, GPU_BATCH = 8, 36


def require_enough(prompts: Sequence[Any]) -> None:
    if len(prompts) < MIN_PROMPTS:
        raise NextscaleError(f"calibration needs at least {MIN_PROMPTS} prompts, not {len(prompts)}")


def batches(
    pipe: Pipeline, prompts: Sequence[Any], seed: int, workers: Workers | None = None
) -> Iterator[dict[str, Any]]:
    """The arguments of the calls that make one image of every prompt, each with its own seed."""
    require_enough(prompts)
    asked = [(prompt, f"prompt {i}") for i, prompt in enumerate(prompts, start=1) if isinstance(prompt, (str, int))]
    for bad in bad_prompts(pipe, asked):
        raise NextscaleError(f"{bad.where}: {bad.reason}")
    size = GPU_BATCH if (pipe.device.type if workers is None else workers.device) == "cuda" else BATCH
    for start in range(0, len(prompts), size):
        some = list(prompts[start : start + size])
        seeds = [seed + start + i for i in range(len(some))]
        key = "prompt" if isinstance(some[0], (str, int)) else "prompt_embeds"
        yield {key: some, "seed": seeds}


@dataclass(frozen=True)
class Calls:
    """Work for `Workers`: what a function finds in a call, with options that all calls of a pass share."""

    find: Callable[[Pipeline, dict[str, Any], dict[str, Any]], Any]
    options: dict[str, Any]

    def __call__(self, pipe: Pipeline) -> Callable[[dict[str, Any]], Any]:
        return lambda call: self.find(pipe, call, self.options)
