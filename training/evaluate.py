"""Does the model draw what it was asked for? Six tasks in the manner of GenEval, judged by the recognizer.

    python -m training.evaluate --run FOLDER [--model FOLDER_OR_NAME] [--method NAME --set field=value]

An image passes if exactly the asked things are found in it. Beyond `nextscale eval scenes`: every concept once, more
prompts of each task, pairs of objects that training never showed together, and a sheet of the failures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from nextscale.io.images import to_pil
from nextscale.methods import Method, Truncate, get_method
from nextscale.models.registry import EMBEDDED
from nextscale.pipeline import Pipeline
from nextscale.research.evaluate.recognizer import Detection, load_recognizer
from nextscale.research.evaluate.scenes import TASKS, ScenePrompt, describe
from nextscale.text.words import WordEncoder
from training import store, train_transformer
from training.common import HERE, device, read_config, sheet
from training.scene_prompts import PAIRS, ScenePromptSampler
from training.scenes import read_vocabulary

SHOWN, PER_TASK, SIDE = 48, 12, 240  # failures on the sheet, of one task if others have some too, pixels of each


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
    parser.add_argument("--run", type=Path, default=HERE / "runs" / "latest", help="folder of what is written")
    parser.add_argument("--model", default=EMBEDDED.name, help="name or folder, also a run's folder")
    parser.add_argument("--config", type=Path, default=HERE / "config.json", help="of a run's folder")
    parser.add_argument("--method", help="what is left out of the computation, e.g. nova")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a setting of the method")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--smoke", action="store_true", help="a few small images, seconds on a CPU")
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
        print(f"{done}/{self.total} images, {elapsed:.0f} s, {left:.0f} s left{text}", flush=True)


@dataclass
class Judged:
    scene_prompt: ScenePrompt
    seed: int
    passed: bool
    found: list[Detection]


class Failures:
    """Small copies of failed images, some of every task."""

    def __init__(self) -> None:
        self.kept: dict[str, list[tuple[Image.Image, str]]] = {}

    def add(self, task: str, image: Image.Image, title: str) -> None:
        kept = self.kept.setdefault(task, [])
        if len(kept) < SHOWN:
            kept.append((image.resize((SIDE, SIDE), Image.Resampling.LANCZOS), title))

    def save(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        first = [x for kept in self.kept.values() for x in kept[:PER_TASK]]
        more = [x for kept in self.kept.values() for x in kept[PER_TASK:]]
        chosen = (first + more)[:SHOWN]
        if chosen:
            images, titles = zip(*chosen, strict=True)
            sheet(images, titles, min(8, len(chosen)), SIDE).save(path)


def row(name: str, passed: int, count: int) -> dict[str, Any]:
    low, high = wilson(passed, count)
    print(f"{name:<20}{passed / max(1, count):>8.1%}   {low:.1%} to {high:.1%}   {passed} of {count}")
    return {"passed": passed, "count": count, "share": passed / max(1, count), "low": low, "high": high}


def report(judged: list[Judged]) -> dict[str, Any]:
    """Prints the table; returns its numbers."""

    def table(tasks: tuple[str, ...]) -> dict[str, Any]:
        of = {task: [j.passed for j in judged if j.scene_prompt.task == task] for task in tasks}
        return {task: row(task, sum(passed), len(passed)) for task, passed in of.items() if passed}

    print("\ntask                   share   95 % interval")
    tasks = table(TASKS)
    mean = sum(t["share"] for t in tasks.values()) / max(1, len(tasks))
    print(f"{'mean of the tasks':<20}{mean:>8.1%}\n")
    pairs = table(PAIRS)
    singles: dict[str, list[Judged]] = {}
    for j in judged:
        if j.scene_prompt.task == "single object":
            singles.setdefault(j.scene_prompt.things[0].name, []).append(j)

    def quality(name: str) -> tuple[float, float]:
        shown = singles[name]
        sure = [max((d.sure for d in j.found if d.name == name), default=0.0) for j in shown]
        return sum(j.passed for j in shown) / len(shown), sum(sure) / len(shown)

    worst = []
    print("\nworst concepts of single object")
    for name in sorted(singles, key=quality)[:20]:
        shown, (share, sure) = singles[name], quality(name)
        saw = "; ".join(describe(j.found, j.scene_prompt) for j in shown)
        print(f"{name:<20}{share:>8.1%}   sure {sure:.2f}   saw {saw}")
        worst.append({"concept": name, "share": share, "sure": sure, "saw": saw})
    return {"tasks": tasks, "mean": mean, "pairs": pairs, "worst": worst}


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--per-task", type=int, default=100, help="prompts of a task")
    parser.add_argument("--pairs", type=int, help="seen and unseen pairs, of each; default: as --per-task")
    parser.add_argument("--singles", type=int, help="prompts of single object; default: every concept once")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    where, scene_prompts = device(), ScenePromptSampler(read_vocabulary())
    size: dict[str, Any] = {}
    method = read_method(options.method, options.set)
    if options.smoke:
        options.per_task, options.pairs, options.singles, options.batch = 1, 1, 2, 4
        size, method = {"pixel_budget": "0.06M"}, method or Truncate(1)
        logging.getLogger("nextscale").setLevel(logging.ERROR)  # that such images are small is known
    counts = dict.fromkeys((*TASKS, *PAIRS), options.per_task)
    counts |= dict.fromkeys(PAIRS, options.per_task if options.pairs is None else options.pairs)
    counts["single object"] = (
        max(len(scene_prompts.plurals), options.per_task) if options.singles is None else options.singles
    )
    asked = [scene_prompt for task, count in counts.items() for scene_prompt in scene_prompts.make(task, count)]
    recognizer = load_recognizer(where)
    pipe = load_pipeline(options.model, read_config(options.config, options.smoke), where)
    progress, failures, judged = Progress(len(asked)), Failures(), []
    for i in range(0, len(asked), options.batch):
        part, seeds = asked[i : i + options.batch], list(range(i, min(i + options.batch, len(asked))))
        made = pipe([a.prompt for a in part], seed=seeds, method=method, output_type="pt", **size).images * 2 - 1
        for k, (scene_prompt, found) in enumerate(zip(part, recognizer.detect(made), strict=True)):
            judged.append(Judged(scene_prompt, seeds[k], scene_prompt.passes(found), found))
            if not judged[-1].passed:
                title = f"{scene_prompt.prompt} | saw {describe(found, scene_prompt)}"
                failures.add(scene_prompt.task, to_pil(made[k : k + 1])[0], title)
        progress(len(judged), f", {sum(j.passed for j in judged) / len(judged):.1%} passed")
    summary = report(judged)
    out = options.run
    out.mkdir(parents=True, exist_ok=True)
    prompts = [
        {
            "task": j.scene_prompt.task,
            "prompt": j.scene_prompt.prompt,
            "seed": j.seed,
            "passed": j.passed,
            "found": [dataclasses.asdict(d) for d in j.found],
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
