"""Make the images of a benchmark that are not there yet."""

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
from nextscale.research.export.base import ImageFile
from nextscale.research.export.folder import FORMATS, ExportFolder
from nextscale.research.export.manifest import FORMAT_VERSION, model_settings, read_manifest, run_facts
from nextscale.research.export.plan import WHOLE, ExportPlan, Shard
from nextscale.research.export.protocol import sampling_for
from nextscale.research.export.weights import weights_sha256
from nextscale.research.prompt_checks import bad_prompts, skipped


@dataclass(frozen=True)
class ExportResult:
    made: int  # now; the others of the shard were there
    missing: int  # images of other shards that are not in this folder
    skipped: int  # prompts that cannot be drawn
    manifest: Path
    commands: list[str]  # to run when nothing is missing


def export(
    pipe: Pipeline,
    plan: ExportPlan,
    out: str | Path,
    *,
    method: Method | None = None,
    shard: Shard = WHOLE,
    batch: int = 1,
    resume: bool = False,
    pixel_budget: str | None = None,
    progress_bar: bool | None = None,
    **sampling: Any,
) -> ExportResult:
    """Export; `sampling` is as in a call of the pipeline, by default the protocol's, or else the model's.

    Batches are cut from the shard's whole list, so an image made after an interruption has the company that it
    would have had without, and its very bytes.
    """
    if batch < 1:
        raise NextscaleError(f"batch must be at least 1, not {batch}")
    plan = checked(pipe, plan)
    values = sampling_for(plan.layout.name, pipe.spec, sampling)
    schedule = pipe.schedule(pixel_budget=pixel_budget)
    height, width = (cells * pipe.tokenizer.stride for cells in schedule.last)
    plan.layout.check_size(height, width)
    chosen = pipe.model.sampling(len(schedule), **values)
    sums = weights_sha256(pipe, progress_bar)
    settings = {**plan.settings(), **model_settings(pipe, sums, method, chosen, (height, width))}
    folder = ExportFolder(Path(out), shard)
    mine = shard.of(plan.image_files)
    prompts = "" if plan.prompts is None else str(plan.prompts.absolute())
    commands = plan.layout.commands(folder.images.absolute(), height, plan.images, prompts)
    content = {
        "nextscale_export": FORMAT_VERSION,
        "settings": settings,
        "prompts": plan.prompts and plan.prompts.name,
        "weight_files": [file.name for file in pipe.weight_files],
        "shard": str(shard),
        "pictures": {"of this shard": len(mine), "in all": len(plan.image_files)},
        "skipped": skipped(plan.skipped),
        "files": FORMATS[Path(plan.image_files[0].path).suffix],
        "next": commands,
    }
    options = {"method": method, "pixel_budget": pixel_budget, **values}
    made = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        folder.check(plan, settings, resume)
        scratch = stack.enter_context(folder.scratch())
        advance = stack.enter_context(bar(plan.layout.title, len(mine), progress_bar))
        for i, group in enumerate(_groups(mine, batch)):
            wanted = [p for p in group if not folder.has(p)]
            tiles = _draw(pipe, group, batch, **options) if wanted else {}
            if i == 0:  # not before: what fails at the first image leaves the folder as it was
                _record(folder, content, run_facts(pipe, batch), scratch)
            for image_file in group:
                folder.save_sidecar(image_file, scratch)
            for image_file in wanted:
                folder.save(image_file, tiles[image_file.path], scratch)
            made += len(wanted)
            advance(len(group))
    missing = sum(not folder.has(p) for p in plan.image_files)
    return ExportResult(made, missing, len(plan.skipped), folder.manifest, commands)


def checked(pipe: Pipeline, plan: ExportPlan) -> ExportPlan:
    """Leave every prompt that the model can draw."""
    kind, name = pipe.backbone.prompts, pipe.spec.name
    if (kind == "label") != (plan.layout.prompts == "label"):
        have = "class labels" if plan.layout.prompts == "label" else "texts"
        takes = "class labels" if kind == "label" else "texts"
        raise NextscaleError(f"the prompts of {plan.layout.title} are {have}, but {name} takes {takes}")
    return plan.without(bad_prompts(pipe, [(e.prompt, e.where) for e in plan.entries]))


def _record(folder: ExportFolder, content: dict[str, Any], run: dict[str, Any], scratch: Path) -> None:
    """Write the manifest; a run on another machine or version adds itself to those that it names."""
    runs = read_manifest(folder.manifest)["runs"] if folder.manifest.exists() else []
    content["runs"] = runs if run in runs else [*runs, run]
    with atomic_write(folder.manifest, scratch) as file:
        file.write(as_json(content))


def _groups(image_files: Sequence[ImageFile], batch: int) -> list[Sequence[ImageFile]]:
    """Cut into batches; at least one, if only to leave a manifest of an empty shard."""
    size = max(1, batch // len(image_files[0].seeds)) if image_files else 1
    return [image_files[i : i + size] for i in range(0, len(image_files), size)] or [()]


def _draw(pipe: Pipeline, group: Sequence[ImageFile], batch: int, **options: Any) -> dict[str, list[Image.Image]]:
    """Generate the tiles of every image file, by its path; a grid may need several calls."""
    prompts = [p.prompt for p in group for _ in p.seeds]
    seeds = [seed for p in group for seed in p.seeds]
    images: list[Image.Image] = []
    for i in range(0, len(seeds), batch):
        part: Any = prompts[i : i + batch]
        images += pipe(part, seed=seeds[i : i + batch], **options).images
    drawn = iter(images)
    return {p.path: [next(drawn) for _ in p.seeds] for p in group}
