"""Does the model draw what it was asked for? Six tasks in the manner of GenEval, judged by the recogniser.

    python -m training.evaluate --run FOLDER [--model FOLDER_OR_NAME] [--method NAME --set field=value]

`--run` is where training.recogniser left its weights. A picture passes if exactly the asked things are found in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from nextscale.images import to_pil
from nextscale.methods import Method, Truncate, get_method
from nextscale.models.registry import EMBEDDED
from nextscale.pipeline import Pipeline
from nextscale.text.words import WordEncoder
from training import store, train_transformer
from training.common import HERE, device, read_config, sheet
from training.recogniser import Detection, class_names, load
from training.scenes import COUNTS, held_out, read_vocabulary

TASKS = ("single object", "two objects", "counting", "colours", "position", "colour attribution")
PAIRS = ("seen pairs", "unseen pairs")  # beside the six: pairs of objects that training did or did not show together
APART = 0.1  # how far centres must lie apart in the asked direction, as a share of the side
SHOWN, PER_TASK, SIDE = 48, 12, 240  # failures on the sheet, of one task if others have some too, pixels of each


@dataclass(frozen=True)
class Thing:
    label: int  # as the recogniser counts: objects, then shapes
    count: int = 1
    colour: int | None = None  # None: any


@dataclass(frozen=True)
class Ask:
    task: str
    text: str
    things: tuple[Thing, ...]
    relation: str | None = None  # of the first to the second

    def passes(self, found: list[Detection]) -> bool:
        wanted = Counter({t.label: t.count for t in self.things})
        if Counter(d.label for d in found) != wanted:
            return False
        colours = {t.label: t.colour for t in self.things if t.colour is not None}
        if any(d.colour != colours.get(d.label, d.colour) for d in found):
            return False
        return self.relation is None or self._placed(found)

    def _placed(self, found: list[Detection]) -> bool:
        first, second = (next(d for d in found if d.label == t.label) for t in self.things)
        right, down = first.x - second.x, first.y - second.y
        along, across = (right, down) if self.relation in ("left of", "right of") else (down, right)
        along = -along if self.relation in ("left of", "above") else along
        return along >= APART and along > abs(across)


class Asks:
    """Prompts in GenEval's plain words, the same ones every time. None names a background or a style."""

    def __init__(self, vocabulary: dict[str, Any], seed: int = 0) -> None:
        self.things = [*vocabulary["objects"], *vocabulary["shapes"]]
        self.objects = len(vocabulary["objects"])
        self.shapes = range(self.objects, len(self.things))
        self.colours = [c["name"] for c in vocabulary["colours"]]
        self.seed = seed

    def name(self, thing: Thing) -> str:
        entry = self.things[thing.label]
        words = [] if thing.colour is None else [self.colours[thing.colour]]
        words.append(entry["name"] if thing.count == 1 else entry["plural"])
        number = "an" if thing.count == 1 and words[0][0] in "aeiou" else COUNTS[thing.count - 1]
        return " ".join((number, *words))

    def make(self, task: str, count: int) -> list[Ask]:
        # Every task has its own numbers, so that a longer one leaves the others as they are.
        rng = np.random.default_rng((self.seed, (*TASKS, *PAIRS).index(task)))
        return [self.ask(task, *drawn) for _, drawn in zip(range(count), self.draw(task, rng), strict=False)]

    def draw(self, task: str, rng: np.random.Generator) -> Iterator[tuple[tuple[Thing, ...], str | None]]:
        # On the white background that captions without one have, nothing white can be seen.
        visible = [i for i, name in enumerate(self.colours) if name != "white"]
        relations = ("left of", "right of", "above", "below")
        for i in range(10**9):
            if task == "single object":
                order = rng.permutation(len(self.things)).tolist()
                yield from (((Thing(label),), None) for label in order)
            elif task == "colours":
                every = [(s, c) for s in self.shapes for c in visible]
                yield from (((Thing(every[k][0], 1, every[k][1]),), None) for k in rng.permutation(len(every)))
            elif task == "counting":
                yield (Thing(int(rng.integers(self.objects)), 2 + i % 3),), None
            elif task == "colour attribution":
                a, b = rng.choice(self.shapes, 2, replace=False).tolist()
                first, second = rng.choice(visible, 2, replace=False).tolist()
                yield (Thing(a, 1, first), Thing(b, 1, second)), None
            else:
                a, b = rng.choice(self.objects, 2, replace=False).tolist()
                while task in PAIRS and held_out(a, b) != (task == "unseen pairs"):
                    a, b = rng.choice(self.objects, 2, replace=False).tolist()
                yield (Thing(a), Thing(b)), relations[i % 4] if task == "position" else None

    def ask(self, task: str, things: tuple[Thing, ...], relation: str | None) -> Ask:
        text = f" {relation or 'and'} ".join(map(self.name, things))
        return Ask(task, text, things, relation)

    def describe(self, found: list[Detection]) -> str:
        def word(d: Detection) -> str:
            name = self.things[d.label]["name"]
            return f"{self.colours[d.colour]} {name}" if d.label >= self.objects else name

        return ", ".join(f"{n} {w}" if n > 1 else w for w, n in Counter(map(word, found)).items()) or "nothing"


def wilson(passed: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The interval that holds the true share with 95 %; it stays inside 0..1 for small counts."""
    if not count:
        return 0.0, 1.0
    share, square = passed / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def load_pipeline(source: str, config: dict[str, Any], where: torch.device) -> Pipeline:
    """A model by name or folder, also a run's folder; in the precision that its device is fast in."""
    dtype, folder = torch.bfloat16 if where.type == "cuda" else torch.float32, Path(source)
    if not (folder / "backbone.safetensors").exists():
        return Pipeline.from_pretrained(source, dtype=dtype, device=where, progress_bar=False)
    backbone, text, tokenizer, lexicon = train_transformer.build(config)
    parts = {"backbone": backbone, "text": text, "tokenizer": tokenizer}
    store.load_into(folder, **parts)
    for part in parts.values():
        part.eval().requires_grad_(False)
    spec = dataclasses.replace(EMBEDDED, backbone=backbone.config, tokenizer=tokenizer.config)
    return Pipeline(backbone, tokenizer, spec, WordEncoder(lexicon, text), progress_bar=False).to(where, dtype)


def read_method(name: str | None, settings: list[str]) -> Method | None:
    if name is None:
        return None
    fields = {}
    for setting in settings:
        field, _, value = setting.partition("=")
        try:
            fields[field] = json.loads(value)
        except json.JSONDecodeError:  # a bare word is text
            fields[field] = value
    return get_method(name).from_fields(fields)


def model_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every command has that looks at a finished model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=HERE / "runs" / "latest", help="folder of the recogniser")
    parser.add_argument("--out", type=Path, help="folder of what is written; default: the run's")
    parser.add_argument("--model", default=EMBEDDED.name, help="name or folder, also a run's folder")
    parser.add_argument("--config", type=Path, default=HERE / "config.json", help="of a run's folder")
    parser.add_argument("--method", help="what is left out of the computation, e.g. nova")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a setting of the method")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--smoke", action="store_true", help="a few small pictures, seconds on a CPU")
    return parser


class Progress:
    """A line every few seconds."""

    def __init__(self, total: int, every: float = 5.0) -> None:
        self.total, self.every = total, every
        self.started = self.shown = time.perf_counter()

    def __call__(self, done: int, text: str = "") -> None:
        now = time.perf_counter()
        if done < self.total and now - self.shown < self.every:
            return
        self.shown, elapsed = now, now - self.started
        left = elapsed / done * (self.total - done)
        print(f"{done}/{self.total} pictures, {elapsed:.0f} s, {left:.0f} s left{text}", flush=True)


@dataclass
class Judged:
    ask: Ask
    seed: int
    passed: bool
    found: list[Detection]


class Failures:
    """Small copies of failed pictures, some of every task."""

    def __init__(self) -> None:
        self.kept: dict[str, list[tuple[Image.Image, str]]] = {}

    def add(self, task: str, picture: Image.Image, title: str) -> None:
        kept = self.kept.setdefault(task, [])
        if len(kept) < SHOWN:
            kept.append((picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS), title))

    def save(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        first = [x for kept in self.kept.values() for x in kept[:PER_TASK]]
        more = [x for kept in self.kept.values() for x in kept[PER_TASK:]]
        chosen = (first + more)[:SHOWN]
        if chosen:
            pictures, titles = zip(*chosen, strict=True)
            sheet(pictures, titles, min(8, len(chosen)), SIDE).save(path)


def row(name: str, passed: int, count: int) -> dict[str, Any]:
    low, high = wilson(passed, count)
    print(f"{name:<20}{passed / max(1, count):>8.1%}   {low:.1%} to {high:.1%}   {passed} of {count}")
    return {"passed": passed, "count": count, "share": passed / max(1, count), "low": low, "high": high}


def report(judged: list[Judged], asks: Asks, names: list[str]) -> dict[str, Any]:
    """Prints the table; returns its numbers."""

    def table(tasks: tuple[str, ...]) -> dict[str, Any]:
        of = {task: [j.passed for j in judged if j.ask.task == task] for task in tasks}
        return {task: row(task, sum(passed), len(passed)) for task, passed in of.items() if passed}

    print("\ntask                   share   95 % interval")
    tasks = table(TASKS)
    mean = sum(t["share"] for t in tasks.values()) / max(1, len(tasks))
    print(f"{'mean of the tasks':<20}{mean:>8.1%}\n")
    pairs = table(PAIRS)
    singles: dict[int, list[Judged]] = {}
    for j in judged:
        if j.ask.task == "single object":
            singles.setdefault(j.ask.things[0].label, []).append(j)

    def quality(label: int) -> tuple[float, float]:
        shown = singles[label]
        sure = [max((d.sure for d in j.found if d.label == label), default=0.0) for j in shown]
        return sum(j.passed for j in shown) / len(shown), sum(sure) / len(shown)

    worst = []
    print("\nworst concepts of single object")
    for label in sorted(singles, key=quality)[:20]:
        shown, (share, sure) = singles[label], quality(label)
        saw = "; ".join(asks.describe(j.found) for j in shown)
        print(f"{names[label]:<20}{share:>8.1%}   sure {sure:.2f}   saw {saw}")
        worst.append({"concept": names[label], "share": share, "sure": sure, "saw": saw})
    return {"tasks": tasks, "mean": mean, "pairs": pairs, "worst": worst}


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--per-task", type=int, default=100, help="prompts of a task")
    parser.add_argument("--pairs", type=int, help="seen and unseen pairs, of each; default: as --per-task")
    parser.add_argument("--singles", type=int, help="prompts of single object; default: every concept once")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    vocabulary, where = read_vocabulary(), device()
    asks, names = Asks(vocabulary), class_names(vocabulary)
    size: dict[str, Any] = {}
    method = read_method(options.method, options.set)
    if options.smoke:
        options.per_task, options.pairs, options.singles, options.batch = 1, 1, 2, 4
        size, method = {"pixel_budget": "0.06M"}, method or Truncate(1)
        logging.getLogger("nextscale").setLevel(logging.ERROR)  # that such pictures are small is known
    counts = dict.fromkeys((*TASKS, *PAIRS), options.per_task)
    counts |= dict.fromkeys(PAIRS, options.per_task if options.pairs is None else options.pairs)
    counts["single object"] = max(len(names), options.per_task) if options.singles is None else options.singles
    asked = [ask for task, count in counts.items() for ask in asks.make(task, count)]
    recogniser = load(options.run, vocabulary, options.smoke, where)
    pipe = load_pipeline(options.model, read_config(options.config, options.smoke), where)
    progress, failures, judged = Progress(len(asked)), Failures(), []
    for i in range(0, len(asked), options.batch):
        part, seeds = asked[i : i + options.batch], list(range(i, min(i + options.batch, len(asked))))
        made = pipe([a.text for a in part], seed=seeds, method=method, output_type="pt", **size).images * 2 - 1
        for k, (ask, found) in enumerate(zip(part, recogniser.detect(made), strict=True)):
            judged.append(Judged(ask, seeds[k], ask.passes(found), found))
            if not judged[-1].passed:
                title = f"{ask.text} | saw {asks.describe(found)}"
                failures.add(ask.task, to_pil(made[k : k + 1])[0], title)
        progress(len(judged), f", {sum(j.passed for j in judged) / len(judged):.1%} passed")
    summary = report(judged, asks, names)
    out = options.out or options.run
    out.mkdir(parents=True, exist_ok=True)
    prompts = [
        {
            "task": j.ask.task,
            "prompt": j.ask.text,
            "seed": j.seed,
            "passed": j.passed,
            "found": [{**dataclasses.asdict(d), "name": names[d.label]} for d in j.found],
        }
        for j in judged
    ]
    head = {
        "model": options.model,
        "method": None if method is None else method.to_dict(),
        "seconds": round(time.perf_counter() - progress.started, 1),
    }
    (out / "evaluation.json").write_text(json.dumps({**head, **summary, "prompts": prompts}, indent=1) + "\n")
    failures.save(out / "failures.png")
    print(f"\nwrote {out / 'evaluation.json'}" + (f" and {out / 'failures.png'}" if failures.kept else ""))


if __name__ == "__main__":
    main()
