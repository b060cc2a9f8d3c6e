"""Make the images of a benchmark that are not there yet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nextscale.cluster.workers import LocalWorkers, Workers
from nextscale.errors import NextscaleError
from nextscale.io.progress import bar
from nextscale.io.writing import as_json, atomic_write
from nextscale.methods import Method
from nextscale.pipeline import Pipeline
from nextscale.research.export.folder import FORMATS, ExportFolder
from nextscale.research.export.groups import Group, GroupMaker, MadeImage, cut
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
    images: list[MadeImage] = field(default_factory=list)  # made now
    seconds: float = 0.0  # that it took to make them


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
    workers: Workers | None = None,
    **sampling: Any,
) -> ExportResult:
    """Export; `sampling` is as in a call of the pipeline, by default the protocol's, or else the model's.

    Batches are cut from the shard's whole list, so an image made after an interruption has the company that it
    would have had without, and its very bytes. `workers` make them, by default this process; if others do, `pipe` is
    asked for settings only.
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
    made: list[MadeImage] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        folder.check(plan, settings, resume)
        scratch = stack.enter_context(folder.scratch())
        advance = stack.enter_context(bar(plan.layout.title, len(mine), progress_bar))
        manifest = stack.enter_context(Manifest(folder, content, scratch))
        groups = _left(folder, cut(mine, batch), scratch)
        advance(len(mine) - sum(map(len, groups)))
        # Before the first image: a folder of images alone is no export.
        manifest.begin(run_facts(pipe, batch) if workers is None and groups else None)  # workers add their own
        maker = GroupMaker(folder, scratch, batch, options)
        begun = time.monotonic()
        for index, group in (workers or LocalWorkers(pipe)).map(maker, groups, lambda group: group[0].path):
            manifest.add(group.run)
            made += group.images
            advance(len(groups[index]))
        seconds = time.monotonic() - begun
    missing = sum(not folder.has(p) for p in plan.image_files)
    return ExportResult(len(made), missing, len(plan.skipped), folder.manifest, commands, made, seconds)


def checked(pipe: Pipeline, plan: ExportPlan) -> ExportPlan:
    """Leave every prompt that the model can draw."""
    kind, name = pipe.backbone.prompts, pipe.spec.name
    if (kind == "label") != (plan.layout.prompts == "label"):
        have = "class labels" if plan.layout.prompts == "label" else "texts"
        takes = "class labels" if kind == "label" else "texts"
        raise NextscaleError(f"the prompts of {plan.layout.title} are {have}, but {name} takes {takes}")
    return plan.without(bad_prompts(pipe, [(e.prompt, e.where) for e in plan.entries]))


def _left(folder: ExportFolder, groups: Sequence[Group], scratch: Path) -> list[Group]:
    """The groups of which an image is missing; the others may lack the files that belong to images."""
    left = []
    for group in groups:
        if all(folder.has(image_file) for image_file in group):
            for image_file in group:
                folder.save_sidecar(image_file, scratch)
        else:
            left.append(group)
    return left


class Manifest:
    """The manifest of an export that is under way; a run on another machine or version adds itself to those that it
    names. If nothing is made after all, it goes."""

    def __init__(self, folder: ExportFolder, content: dict[str, Any], scratch: Path) -> None:
        self.folder, self.scratch, self.is_new = folder, scratch, not folder.manifest.exists()
        runs = [] if self.is_new else read_manifest(folder.manifest)["runs"]
        self.content = {**content, "runs": runs}

    def begin(self, run: dict[str, Any] | None) -> None:
        self.content["runs"] += [run] if run not in (None, *self.content["runs"]) else []
        self._write()

    def add(self, run: dict[str, Any]) -> None:
        if run not in self.content["runs"]:
            self.begin(run)

    def _write(self) -> None:
        with atomic_write(self.folder.manifest, self.scratch) as file:
            file.write(as_json(self.content))

    def __enter__(self) -> Manifest:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and self.is_new and not self.folder.images.exists():
            self.folder.manifest.unlink(missing_ok=True)
