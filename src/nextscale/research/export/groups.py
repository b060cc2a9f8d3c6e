"""One batch of image files: who makes it, and where, does not matter to its bytes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from nextscale.pipeline import Pipeline
from nextscale.research.export.base import ImageFile
from nextscale.research.export.folder import ExportFolder
from nextscale.research.export.manifest import run_facts

Group = Sequence[ImageFile]


@dataclass(frozen=True)
class MadeImage:
    """What comes back of an image; the image itself is in its file."""

    id: int  # of the prompt in its file
    path: str
    ms: float  # its share of the batch, file included
    tokens: int  # computed, in the mean over layers


@dataclass(frozen=True)
class MadeGroup:
    images: list[MadeImage]  # that were missing
    run: dict[str, Any]  # who made them


@dataclass(frozen=True)
class GroupMaker:
    """Makes what is missing of a group, whole: an image has the company that it would have had without a stop."""

    folder: ExportFolder
    scratch: Path
    batch: int
    options: dict[str, Any]  # of a call

    def __call__(self, pipe: Pipeline) -> Callable[[Group], MadeGroup]:
        return functools.partial(self.make, pipe, run_facts(pipe, self.batch))

    def make(self, pipe: Pipeline, run: dict[str, Any], group: Group) -> MadeGroup:
        begun = time.perf_counter()
        missing = [p for p in group if not self.folder.has(p)]
        drawn = self._draw(pipe, group) if missing else {}
        for image_file in group:
            self.folder.save_sidecar(image_file, self.scratch)
        for image_file in missing:
            self.folder.save(image_file, drawn[image_file.path][0], self.scratch)
        ms = 1000 * (time.perf_counter() - begun) / max(len(missing), 1)
        return MadeGroup([MadeImage(p.prompt_index, p.path, ms, drawn[p.path][1]) for p in missing], run)

    def _draw(self, pipe: Pipeline, group: Group) -> dict[str, tuple[list[Image.Image], int]]:
        """Generate the tiles of every image file, and their tokens, by its path; a grid may need several calls."""
        prompts = [p.prompt for p in group for _ in p.seeds]
        seeds = [seed for p in group for seed in p.seeds]
        tiles: list[tuple[Image.Image, float]] = []
        for i in range(0, len(seeds), self.batch):
            part: Any = prompts[i : i + self.batch]
            made = pipe(part, seed=seeds[i : i + self.batch], **self.options)
            tiles += [(image, made.trace.tokens(n)) for n, image in enumerate(made.images)]
        left = iter(tiles)
        found = {}
        for image_file in group:
            mine = [next(left) for _ in image_file.seeds]
            found[image_file.path] = [image for image, _ in mine], round(sum(tokens for _, tokens in mine))
        return found


def cut(image_files: Sequence[ImageFile], batch: int) -> list[Group]:
    """Cut into batches."""
    size = max(1, batch // len(image_files[0].seeds)) if image_files else 1
    return [image_files[i : i + size] for i in range(0, len(image_files), size)]
