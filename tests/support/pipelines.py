"""Recorded cases, calls and comparisons that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from support.weights import DATA, write_missing

from nextscale.pipeline import Pipeline

write_missing()
BUNDLED = sorted(p.parent for p in DATA.glob("**/config.json"))


def _cases(folders: str | None, pattern: str) -> list[Path]:
    return sorted(p.parent for folder in (folders or "").split(":") if folder for p in Path(folder).glob(pattern))


# More recordings than the repository holds: what tests read outside of it, the environment names.
MORE = _cases(os.environ.get("NEXTSCALE_CASES"), "**/config.json")


def embeds(*lengths: int, seed: int = 0, dim: int = 128) -> list[torch.Tensor]:
    """Text features of made-up prompts."""
    generator = torch.Generator().manual_seed(1000 + seed)  # not the numbers of the tiny models
    return [torch.randn(n, dim, generator=generator) for n in lengths]


def ask(pipe: Pipeline, images: int = 1, first: int = 0, **options):
    """A call whose i-th image is always the same prompt, on any model; the seeds have no close decision."""
    which = range(first, first + images)
    options.setdefault("seed", [139 + i for i in which])
    if pipe.backbone.prompts == "label":
        return pipe([i % 10 for i in which], **options)
    if pipe.backbone.family == "infinity":
        options.setdefault("pixel_budget", "0.06M")
    return pipe(prompt_embeds=[embeds(3 + i, seed=i)[0] for i in which], **options)


def same_tokens(a, b) -> bool:
    return len(a.tokens) == len(b.tokens) and all(torch.equal(x, y) for x, y in zip(a.tokens, b.tokens, strict=True))
