"""Make the pictures of a benchmark that are not there yet."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from nextscale.errors import NextscaleError
from nextscale.io.progress import bar
from nextscale.io.writing import as_json, atomic_write
from nextscale.methods import Method
from nextscale.pipeline import Pipeline
from nextscale.research.export.base import Picture
from nextscale.research.export.folder import FORMATS, Folder
from nextscale.research.export.manifest import FORMAT, model_settings, read_manifest, run_facts
from nextscale.research.export.protocol import sampling_for
from nextscale.research.export.weights import weights_sha256
from nextscale.research.export.work import WHOLE, Shard, Work
from nextscale.research.prompt_files import bad_prompts, skipped


@dataclass(frozen=True)
class Exported:
    made: int  # now; the others of the shard were there
    missing: int  # pictures of other shards that are not in this folder
    skipped: int  # prompts that cannot be drawn
    manifest: Path
    commands: list[str]  # to run when nothing is missing


def export(
    pipe: Pipeline,
    work: Work,
    out: str | Path,
    *,
    method: Method | None = None,
    shard: Shard = WHOLE,
    batch: int = 1,
    resume: bool = False,
    pixel_budget: str | None = None,
    progress_bar: bool | None = None,
    **sampling: Any,
) -> Exported:
    """`sampling` as in a call of the pipeline; what is not given is the protocol's, or else the model's.

    Batches are cut from the shard's whole list, so a picture made after an interruption has the company that it
    would have had without, and its very bytes.
    """
    if batch < 1:
        raise NextscaleError(f"batch must be at least 1, not {batch}")
    work = checked(pipe, work)
    values = sampling_for(work.layout.name, pipe.spec, sampling)
    schedule = pipe.schedule(pixel_budget=pixel_budget)
    height, width = (cells * pipe.tokenizer.stride for cells in schedule.last)
    work.layout.check_size(height, width)
    chosen = pipe.sampling(len(schedule), **values)
    sums = weights_sha256(pipe, progress_bar)
    settings = {**work.settings(), **model_settings(pipe, sums, method, chosen, (height, width))}
    folder = Folder(Path(out), shard)
    mine = shard.of(work.pictures)
    prompts = "" if work.prompts is None else str(work.prompts.absolute())
    commands = work.layout.commands(folder.images.absolute(), height, work.images, prompts)
    content = {
        "nextscale_export": FORMAT,
        "settings": settings,
        "prompts": work.prompts and work.prompts.name,
        "weight_files": [file.name for file in pipe.weight_files],
        "shard": str(shard),
        "pictures": {"of this shard": len(mine), "in all": len(work.pictures)},
        "skipped": skipped(work.skipped),
        "files": FORMATS[Path(work.pictures[0].path).suffix],
        "next": commands,
    }
    options = {"method": method, "pixel_budget": pixel_budget, **values}
    made = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        folder.check(work, settings, resume)
        scratch = stack.enter_context(folder.scratch())
        advance = stack.enter_context(bar(work.layout.title, len(mine), progress_bar))
        for i, group in enumerate(_groups(mine, batch)):
            wanted = [p for p in group if not folder.has(p)]
            tiles = _draw(pipe, group, batch, **options) if wanted else {}
            if i == 0:  # not before: what fails at the first picture leaves the folder as it was
                _record(folder, content, run_facts(pipe, batch), scratch)
            for picture in group:
                folder.save_beside(picture, scratch)
            for picture in wanted:
                folder.save(picture, tiles[picture.path], scratch)
            made += len(wanted)
            advance(len(group))
    missing = sum(not folder.has(p) for p in work.pictures)
    return Exported(made, missing, len(work.skipped), folder.manifest, commands)


def checked(pipe: Pipeline, work: Work) -> Work:
    """Every prompt is one that the model can draw."""
    kind, name = pipe.backbone.prompts, pipe.spec.name
    if (kind == "label") != (work.layout.prompts == "label"):
        have = "class labels" if work.layout.prompts == "label" else "texts"
        takes = "class labels" if kind == "label" else "texts"
        raise NextscaleError(f"the prompts of {work.layout.title} are {have}, but {name} takes {takes}")
    return work.without(bad_prompts(pipe, [(e.prompt, e.where) for e in work.entries]))


def _record(folder: Folder, content: dict[str, Any], run: dict[str, Any], scratch: Path) -> None:
    """The manifest; a run on another machine or version adds itself to those that it names."""
    runs = read_manifest(folder.manifest)["runs"] if folder.manifest.exists() else []
    content["runs"] = runs if run in runs else [*runs, run]
    with atomic_write(folder.manifest, scratch) as file:
        file.write(as_json(content))


def _groups(pictures: Sequence[Picture], batch: int) -> list[Sequence[Picture]]:
    """At least one, if only to leave a manifest: a shard may be empty where there are more of them than prompts."""
    size = max(1, batch // len(pictures[0].seeds)) if pictures else 1
    return [pictures[i : i + size] for i in range(0, len(pictures), size)] or [()]


def _draw(pipe: Pipeline, group: Sequence[Picture], batch: int, **options: Any) -> dict[str, list[Image.Image]]:
    """The tiles of every picture, by its path; a grid may need several calls."""
    prompts = [p.prompt for p in group for _ in p.seeds]
    seeds = [seed for p in group for seed in p.seeds]
    images: list[Image.Image] = []
    for i in range(0, len(seeds), batch):
        part: Any = prompts[i : i + batch]
        images += pipe(part, seed=seeds[i : i + batch], **options).images
    drawn = iter(images)
    return {p.path: [next(drawn) for _ in p.seeds] for p in group}
