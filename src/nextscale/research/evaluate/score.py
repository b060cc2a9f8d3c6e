"""Score a folder of images."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.errors import NextscaleError
from nextscale.io.devices import as_device
from nextscale.io.progress import bar
from nextscale.research.evaluate.distances import frechet_distance
from nextscale.research.evaluate.score_files import ImageFolder, open_folder, read_prompts, require_pairs
from nextscale.research.evaluate.score_metrics import Metric, load, require
from nextscale.research.evaluate.statistics import Resampling
from nextscale.version import installed_version

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    metric: Metric
    value: float  # the mean, or the distance of two sets
    interval: tuple[float, float] | None  # of the mean, 95 %
    values: dict[str, float]  # by image; a distance of two sets has none
    images: int
    references: int | None

    def to_dict(self) -> dict[str, Any]:
        package = self.metric.package
        release = package and (installed_version(package.name) or "of unknown version")
        return {
            "value": self.value,
            "interval_95": self.interval,
            "higher_is_better": self.metric.higher,
            "summary": self.metric.summary,
            "package": "nextscale" if package is None else f"{package.name} {release}",
            "pictures": self.images,
            "references": self.references,
            "values": self.values,
        }


@dataclass(frozen=True)
class _Input:
    """What a metric is computed from, and how."""

    images: ImageFolder
    target: ImageFolder | None
    prompts: dict[str, str]
    device: torch.device
    show: bool | None

    def batches(self, metric: Metric, folder: ImageFolder) -> Iterator[tuple[list[str], Tensor]]:
        with bar(f"{metric.name} of {folder.root.name}", len(folder.sizes), self.show) as advance, torch.no_grad():
            for names in folder.batches():
                yield names, folder.read(names, self.device)
                advance(len(names))


def score(
    folder: str | Path,
    metrics: Sequence[Metric],
    reference: str | Path | None = None,
    prompts: str | Path | None = None,
    device: str = "cpu",
    progress_bar: bool | None = None,
) -> list[Score]:
    for metric in metrics:
        if metric.needs != "prompts" and reference is None:
            raise NextscaleError(f"{metric.name} compares with other images: name their folder with --reference")
        if metric.needs == "prompts" and prompts is None:
            raise NextscaleError(f"{metric.name} needs the prompts of the images: name their file with --prompts")
        require(metric)
    where, images = as_device(device), open_folder(Path(folder))
    target = None if reference is None else open_folder(Path(reference))
    if target is not None and any(m.needs == "pairs" for m in metrics):
        require_pairs(images, target)
    texts = {} if prompts is None else read_prompts(Path(prompts), images)
    inputs = _Input(images, target, texts, where, progress_bar)
    described: dict[Any, tuple[Tensor, Tensor]] = {}  # two distances of the same features need them once
    scores: dict[str, Score] = {}
    # What may have to be downloaded comes first: if that fails, nothing was computed in vain.
    for metric in sorted(metrics, key=lambda m: m.package is None):
        if metric.distance is None:
            scores[metric.name] = _mean(metric, inputs)
            continue
        if metric.load not in described:
            described[metric.load] = _describe(metric, inputs)
        one, other = described[metric.load]
        if metric.distance is frechet_distance and min(len(one), len(other)) <= one.shape[1]:
            logger.warning(
                "%s is far too large for fewer images than the %d features; kernel and kid are not",
                metric.name,
                one.shape[1],
            )
        scores[metric.name] = Score(metric, metric.distance(one, other), None, {}, len(one), len(other))
    return [scores[metric.name] for metric in metrics]


def interval(values: Tensor, seed: int = 0) -> tuple[float, float]:
    """Of the mean, by bootstrap over images."""
    found = Resampling([str(i) for i in range(len(values))], [""] * len(values), seed).mean(values.numpy())
    return found.low, found.high


def _mean(metric: Metric, inputs: _Input) -> Score:
    """A metric that every image has for itself."""
    run, values = load(metric, inputs.device), dict[str, float]()
    target = inputs.target if metric.needs == "pairs" else None
    for names, images in inputs.batches(metric, inputs.images):
        partners = [inputs.prompts[n] for n in names] if target is None else target.read(names, inputs.device)
        values.update(zip(names, run(images, partners).tolist(), strict=True))
    strange = next((name for name, value in values.items() if not math.isfinite(value)), None)
    if strange is not None:
        raise NextscaleError(f"{metric.name} of {strange} is {values[strange]}: of that there is no mean")
    every = torch.tensor(list(values.values()), dtype=torch.float64)
    references = None if target is None else len(target.sizes)
    return Score(metric, float(every.mean()), interval(every), values, len(values), references)


def _describe(metric: Metric, inputs: _Input) -> tuple[Tensor, Tensor]:
    """Features of the images and of those that they are compared with."""
    run = load(metric, inputs.device)
    assert inputs.target is not None
    one, other = (
        torch.cat([run(images) for _, images in inputs.batches(metric, folder)])
        for folder in (inputs.images, inputs.target)
    )
    return one, other
