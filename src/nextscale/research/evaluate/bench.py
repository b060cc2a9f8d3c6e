"""Images of many prompts with several methods, graded and compared with the plain ones, cell by cell.

A cell is one batch of images of one method. Its result is a file, written whole; a run that goes on skips the cells
that are there. All methods draw a batch with the same seeds, directly after the plain run that they are compared with.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nextscale.cluster.workers import Workers
from nextscale.errors import NextscaleError
from nextscale.io.devices import synchronize
from nextscale.io.progress import bar
from nextscale.io.reading import parse_json, read_text
from nextscale.io.writing import as_json, atomic_write
from nextscale.methods import Method
from nextscale.pipeline import Pipeline
from nextscale.research.evaluate.features import features as network_features
from nextscale.research.evaluate.features import perceptual
from nextscale.research.evaluate.psnr import EQUAL, psnr
from nextscale.research.evaluate.recognizer import load_recognizer
from nextscale.research.evaluate.scenes import ScenePrompt, describe
from nextscale.research.evaluate.ssim import ssim
from nextscale.research.export.manifest import run_facts
from nextscale.research.prompt_checks import BadPrompt

RECORD_KEYS = {"passed", "found", "seconds", "tokens", "flops", "psnr", "ssim", "perceptual", "starts"}  # of a record
DIGITS = 6  # of what is measured: more say nothing, and cells go from machine to machine
REFERENCE_SEED_OFFSET = 10**6  # the reference images have seeds of their own


@dataclass(frozen=True)
class Item:
    scene_prompt: ScenePrompt
    seed: int


@dataclass(frozen=True)
class GeneratedBatch:
    images: Tensor  # [B, 3, H, W] in [0, 1]
    seconds: float  # per image
    traced: list[dict[str, Any]]  # what the trace says of each


@dataclass(frozen=True)
class Cell:
    """What one method made of one batch."""

    records: list[dict[str, Any]]  # per image
    features: np.ndarray | None  # [images, 1280], for distances between sets


@dataclass
class Bench:
    pipe: Pipeline
    items: Sequence[Item]
    batch: int = 1
    folder: Path | None = None  # None: nothing is kept
    with_features: bool = True  # features and perceptual distance, which need the extra `eval`
    size: dict[str, Any] = field(default_factory=dict)  # of the images, as in a call
    skipped: Sequence[BadPrompt] = ()  # prompts that this model cannot draw
    workers: Workers | None = None  # who draws; None: this process

    def __post_init__(self) -> None:
        self.recognizer = load_recognizer(self.pipe.device)
        self.warm: set[str] = set()
        self.made_by: dict[str, Any] | None = None  # the first who drew something

    @property
    def device(self) -> str:
        """The type of the device that draws."""
        return self.pipe.device.type if self.workers is None else self.workers.device

    @property
    def run_facts(self) -> dict[str, Any]:
        return self.made_by or run_facts(self.pipe, self.batch)

    def batches(self) -> list[Sequence[Item]]:
        return [self.items[i : i + self.batch] for i in range(0, len(self.items), self.batch)]

    def run(
        self, methods: dict[str, Method | None], reference: bool = False, show: bool | None = None
    ) -> dict[str, Cell]:
        """Run every method, under its name; `reference` adds plain images of other seeds."""
        names = [*methods, *["reference"] * reference]
        with bar("images", len(self.items) * len(names), show) as advance:
            if self.workers is None:
                parts = range(len(self.batches()))
                made = {number: self.run_batch(methods, reference, advance, number) for number in parts}
            else:
                made = self._run_by(self.workers, methods, reference, advance)
        return {name: _joined([made[number][name] for number in sorted(made)]) for name in names}

    def _run_by(
        self, workers: Workers, methods: dict[str, Method | None], reference: bool, advance: Callable[[int], None]
    ) -> dict[int, dict[str, Cell]]:
        """Have others draw the batches of which a cell is missing."""
        made: dict[int, dict[str, Cell]] = {}
        left = [number for number in range(len(self.batches())) if not self._is_complete(number, methods, reference)]
        for number in set(range(len(self.batches()))) - set(left):
            made[number] = self.run_batch(methods, reference, advance, number)  # which only reads
        maker = BatchMaker(
            tuple(self.items), self.batch, self.folder, self.with_features, self.size, methods, reference
        )
        for index, (cells, run) in workers.map(maker, left, lambda number: f"batch {number}"):
            self.made_by = self.made_by or run
            made[left[index]] = cells
            advance(sum(len(cell.records) for cell in cells.values()))
        return made

    def run_batch(
        self, methods: dict[str, Method | None], reference: bool, advance: Callable[[int], None], number: int
    ) -> dict[str, Cell]:
        """Run every method on one batch, or read what is there of it."""
        part, plain, cells = self.batches()[number], None, dict[str, Cell]()
        # The plain run first: it was timed, and the others are compared with its images.
        for name in sorted(
            (*methods, *["reference"] * reference), key=lambda n: n not in methods or methods[n] is not None
        ):
            method, is_reference = methods.get(name), name not in methods
            path = self._path(number, method, is_reference)
            cell = None if path is None or not path.exists() else _read(path)
            if cell is None:
                if method is not None and plain is None:
                    plain = self._draw(part, None).images
                items = [Item(i.scene_prompt, i.seed + REFERENCE_SEED_OFFSET) for i in part] if is_reference else part
                drawn = self._draw(items, method)
                if method is None and not is_reference:
                    plain = drawn.images
                cell = self._judge(items, drawn, drawn.images if method is None or plain is None else plain)
                if path is not None:
                    _write(path, cell)
            cells[name] = cell
            advance(len(part))
        return cells

    def complete_items(self, methods: dict[str, Method | None], reference: bool = False) -> int:
        """Count the items, from the first on, of which all methods have their cells."""
        done = 0
        for number, part in enumerate(self.batches()):
            if not self._is_complete(number, methods, reference):
                break
            done += len(part)
        return done

    def _is_complete(self, number: int, methods: dict[str, Method | None], reference: bool) -> bool:
        wanted = [(m, False) for m in methods.values()] + [(None, True)] * reference
        paths = [self._path(number, method, is_reference) for method, is_reference in wanted]
        return all(p is not None and p.exists() for p in paths)

    def _path(self, number: int, method: Method | None, is_reference: bool) -> Path | None:
        return None if self.folder is None else self.folder / "cells" / f"{number:04}-{_key(method, is_reference)}.json"

    def _draw(self, items: Sequence[Item], method: Method | None) -> GeneratedBatch:
        prompts, seeds = [i.scene_prompt.prompt for i in items], [i.seed for i in items]
        self._warm(prompts[0], method)
        synchronize(self.pipe.device)
        start = time.perf_counter()
        made = self.pipe(prompts, seed=seeds, method=method, output_type="pt", **self.size)
        synchronize(self.pipe.device)
        seconds = (time.perf_counter() - start) / len(items)
        return GeneratedBatch(made.images.float().clamp(0, 1), seconds, made.trace.to_dict()["images"])

    def _warm(self, prompt: str, method: Method | None) -> None:
        """Pay what the first call pays for all others. On a CPU that is little: three scales will do."""
        cuda = self.pipe.device.type == "cuda"
        key = _key(method, False) if cuda else "any"
        if key in self.warm:
            return
        self.warm.add(key)
        stop = None if cuda else (lambda end: False if end.scale.index >= 2 else None)
        self.pipe(prompt, seed=0, method=method if cuda else None, callback_on_scale_end=stop, **self.size)

    def _judge(self, items: Sequence[Item], drawn: GeneratedBatch, plain: Tensor) -> Cell:
        images = drawn.images
        found = self.recognizer.detect(images * 2 - 1)
        n, own = len(items), plain is images  # an image compared with itself
        psnrs = torch.full((n,), EQUAL) if own else psnr(images, plain, 1.0)
        ssims = torch.ones(n) if own else ssim(images, plain, 1.0)
        distances, features = None, None
        if self.with_features:
            distances = torch.zeros(n) if own else perceptual(images, plain)
            features = network_features(images).half().cpu().numpy()
        records = []
        for k, (item, seen, trace) in enumerate(zip(items, found, drawn.traced, strict=True)):
            records.append(
                {
                    "passed": item.scene_prompt.passes(seen),
                    "found": describe(seen, item.scene_prompt),
                    "seconds": _short(drawn.seconds),
                    "tokens": _short(trace["row_tokens_computed"] / trace["row_tokens_full"]),
                    "flops": _short(trace["flops"] / trace["flops_full"]),
                    "psnr": _short(psnrs[k]),
                    "ssim": _short(ssims[k]),
                    "perceptual": None if distances is None else _short(distances[k]),
                    "starts": trace["activation"]["scale"],
                }
            )
        return Cell(records, features)


@dataclass(frozen=True)
class BatchMaker:
    """A bench on a worker: it makes the cells of a batch."""

    items: tuple[Item, ...]
    batch: int
    folder: Path | None
    with_features: bool
    size: dict[str, Any]
    methods: dict[str, Method | None]
    reference: bool

    def __call__(self, pipe: Pipeline) -> Callable[[int], tuple[dict[str, Cell], dict[str, Any]]]:
        bench = Bench(pipe, self.items, self.batch, self.folder, self.with_features, self.size)
        run = bench.run_facts
        return lambda number: (bench.run_batch(self.methods, self.reference, lambda step: None, number), run)


def make_items(scene_prompts: Sequence[ScenePrompt], seeds: int) -> list[Item]:
    """Pair every prompt with as many seeds; no two images share one.

    Tasks and backgrounds take turns, so that the first part of an evaluation is already a small one of all.
    """
    counts: Counter[tuple[str, str]] = Counter()
    turn = []
    for scene_prompt in scene_prompts:
        kind = scene_prompt.background, scene_prompt.task
        turn.append(counts[kind])
        counts[kind] += 1
    order = sorted(range(len(scene_prompts)), key=lambda i: turn[i])
    return [Item(scene_prompts[i], 1000 * r + i) for r in range(seeds) for i in order]


def _key(method: Method | None, is_reference: bool) -> str:
    """Name a method by its settings, whatever name it was given."""
    if method is None:
        return "reference" if is_reference else "none"
    text = json.dumps(method.to_dict(), sort_keys=True)
    return f"{method.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _short(value: float | Tensor) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def _joined(cells: list[Cell]) -> Cell:
    features = [c.features for c in cells]
    known = [f for f in features if f is not None]
    return Cell([r for c in cells for r in c.records], np.concatenate(known) if len(known) == len(cells) else None)


def _write(path: Path, cell: Cell) -> None:
    """Write the records last: where they are, the cell is complete."""
    if cell.features is not None:
        with atomic_write(path.with_suffix(".npy")) as file:
            np.save(file, cell.features)
    with atomic_write(path) as file:
        file.write(as_json(cell.records, indent=None))


def _read(path: Path) -> Cell:
    try:
        records = parse_json(read_text(path))
        known = path.with_suffix(".npy")
        if not isinstance(records, list) or not all(isinstance(r, dict) and set(r) == RECORD_KEYS for r in records):
            raise ValueError("it does not hold what was measured")
        return Cell(records, np.load(known) if known.exists() else None)
    except (OSError, ValueError, EOFError) as error:
        raise NextscaleError(f"{path} is damaged ({error}); delete it and run again") from None
