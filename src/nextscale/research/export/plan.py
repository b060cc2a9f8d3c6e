"""What is to be made: every file of a benchmark, and the share of one shard."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nextscale.errors import NextscaleError
from nextscale.research.export.base import ImageFile, Layout, PromptEntry
from nextscale.research.export.layouts import get_layout
from nextscale.research.export.reading import digest
from nextscale.research.prompt_checks import BadPrompt, refuse


@dataclass(frozen=True)
class Shard:
    """The i-th of n parts, counted from 1. Parts are prompts, so no batch size moves an image to another part."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found:
            raise NextscaleError(f"shard {text!r} is not of the form i/n, such as 1/4")
        index, count = map(int, found.groups())
        if not 1 <= index <= count:
            raise NextscaleError(f"shard {text} is out of range; allowed: 1/{count} to {count}/{count}")
        return cls(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def suffix(self) -> str:
        return "" if self.count == 1 else f"-{self.index}of{self.count}"

    def of(self, image_files: tuple[ImageFile, ...]) -> list[ImageFile]:
        return [p for p in image_files if p.prompt_index % self.count == self.index - 1]


WHOLE = Shard()


@dataclass(frozen=True)
class ExportPlan:
    layout: Layout
    prompts: Path | None
    prompts_sha256: str | None  # None: the benchmark itself names them
    images: int  # per prompt
    seed: int
    entries: tuple[PromptEntry, ...]  # to be drawn
    skipped: tuple[BadPrompt, ...] = ()
    skip_bad: bool = False

    @classmethod
    def read(
        cls, benchmark: str, prompts: Path | None, images: int | None = None, seed: int = 0, skip_bad: bool = False
    ) -> ExportPlan:
        """Read the prompts; `skip_bad`: leave out, and list, what cannot be drawn, instead of refusing it."""
        layout = get_layout(benchmark)
        files = layout.find(prompts)
        entries = layout.read(files, prompts)
        count = layout.images if images is None else images
        layout.check_images(count)
        plan = cls(layout, prompts, digest(files) if files else None, count, seed, tuple(entries), (), skip_bad)
        problems = [(e, layout.problem(e.prompt)) for e in entries]
        return plan.without([BadPrompt(e.where, str(e.prompt), reason) for e, reason in problems if reason])

    def without(self, bad: Sequence[BadPrompt]) -> ExportPlan:
        """Drop bad prompts, or raise unless they are to be skipped."""
        refuse(bad, self.skip_bad, len(self.entries))
        names = {(b.where, b.prompt) for b in bad}
        left = tuple(e for e in self.entries if (e.where, str(e.prompt)) not in names)
        return replace(self, entries=left, skipped=(*self.skipped, *bad)) if bad else self

    @cached_property
    def image_files(self) -> tuple[ImageFile, ...]:
        return tuple(self.layout.image_files(list(self.entries), self.images, self.seed))

    @cached_property
    def known_paths(self) -> set[str]:
        """Every path that may lie in the folder of images."""
        return {p.path for p in self.image_files} | {p.sidecar[0] for p in self.image_files if p.sidecar}

    def settings(self) -> dict[str, Any]:
        return {
            "benchmark": self.layout.name,
            "prompts_sha256": self.prompts_sha256,
            "images_per_prompt": self.images,
            "seed": self.seed,
            "seed_rule": self.layout.seed_rule,
        }
