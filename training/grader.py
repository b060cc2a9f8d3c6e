"""How often is the recognizer's verdict right? Painted images that are as asked, and ones that differ in one thing.

    python -m training.grader [--recognizer FOLDER]     # writes the shares into the recognizer's config.json

The images go through the tokenizer, as generated ones do. Wrong ones are near misses: another object, one too many
or too few, another color, the two things exchanged. Scenes are drawn anew; none was trained on. Backgrounds are white,
and the full ones of the frozen list.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nextscale.pipeline import Pipeline
from nextscale.research.evaluate.recognizer import FOLDER, load_recognizer, read_about
from nextscale.research.evaluate.scenes import BACKGROUNDS, TASKS, SceneObject, ScenePrompt
from nextscale.text.words import Lexicon
from training.common import arguments, device, make_painter, read_config
from training.scene_prompts import ScenePromptSampler
from training.scenes import PLACES, Item, Scene, Scenes, batch_of, read_vocabulary, words_of


def spoilt(scene_prompt: ScenePrompt, scene_prompts: ScenePromptSampler, rng: np.random.Generator) -> ScenePrompt:
    """The same question about something else, which an image of this one must not pass."""

    def other(names: list[str], used: set[str | None]) -> str:
        return str(rng.choice([n for n in names if n not in used]))

    first, *rest = scene_prompt.things
    names = {t.name for t in scene_prompt.things}
    if scene_prompt.task == "counting":
        fewer = first.count == 4 or (first.count == 3 and rng.random() < 0.5)
        first = dataclasses.replace(first, count=first.count + (-1 if fewer else 1))
    elif scene_prompt.task == "position":
        first, rest = rest[0], [first]
    elif scene_prompt.task == "colour attribution" and rng.random() < 0.5:
        second = rest[0]
        first, rest = (
            dataclasses.replace(first, color=second.color),
            [dataclasses.replace(second, color=first.color)],
        )
    elif first.color is not None:
        first = dataclasses.replace(first, color=other(scene_prompts.colors, {t.color for t in scene_prompt.things}))
    else:
        first = dataclasses.replace(first, name=other([*scene_prompts.objects, *scene_prompts.shapes], {*names}))
    return dataclasses.replace(scene_prompt, things=(first, *rest))


def scene_of(scene_prompt: ScenePrompt, drawer: Scenes, rng: np.random.Generator) -> Scene:
    """An image of it, in any style."""
    shapes = [s["name"] for s in drawer.shapes]

    def item(thing: SceneObject) -> Item:
        if thing.name not in shapes:
            return Item([o["name"] for o in drawer.objects].index(thing.name), thing.count)
        index = shapes.index(thing.name)
        color = drawer.usual[index] if thing.color is None else drawer.colors.index(thing.color)
        return Item(index, thing.count, color)

    items = tuple(map(item, scene_prompt.things))
    counts = [i.count for i in items]
    relation = scene_prompt.relation or ("left of" if len(items) > 1 else None)
    places = drawer.places(rng, relation, counts)
    background, colors = background_of(scene_prompt.prompt, drawer)
    return Scene(scene_prompt.task, items, int(rng.integers(3)), background, colors, places, "a circle")


def background_of(prompt: str, drawer: Scenes) -> tuple[str, tuple[int, int]]:
    """What a prompt has behind its things, white if it names nothing: the painter's name for it, and its colors."""
    if place := next((name for name, words in PLACES.items() if prompt.endswith(f" {words}")), None):
        return place, (drawer.white, drawer.white)
    if found := re.search(r" on an? (\w+)(?: to (\w+))? (\w+) background$", prompt):
        first, second, pattern = found.groups()
        return pattern, (drawer.colors.index(first), drawer.colors.index(second or first))
    return "plain", (drawer.white, drawer.white)


def visible(scene: Scene, drawer: Scenes) -> bool:
    return all(item.color != drawer.white for item in scene.items)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--recognizer", type=Path, default=FOLDER)
    parser.add_argument("--per-task", type=int, default=200, help="right images of a task, and as many wrong ones")
    parser.add_argument("--background", choices=BACKGROUNDS, help="only this kind; the other's shares stay as they are")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    config, where, vocabulary = read_config(options.config, options.smoke), device(), read_vocabulary()
    painter = make_painter(options.sprites, config, where, options.smoke)
    recognizer = load_recognizer(where, options.recognizer)
    pipe = Pipeline.from_pretrained(device=where, progress_bar=False)
    tokenizer, schedule = pipe.tokenizer, pipe.schedule(pixel_budget="0.06M" if options.smoke else None)
    drawer, lexicon, rng = Scenes(vocabulary, jitter=2.0), Lexicon(words_of(vocabulary)), np.random.default_rng(77)
    scene_prompts = ScenePromptSampler(vocabulary, seed=1)
    backgrounds = (options.background,) if options.background else BACKGROUNDS
    result: dict[str, dict[str, Any]] = {background: {} for background in backgrounds}
    for background, task in itertools.product(backgrounds, TASKS):
        pairs = []  # a scene, and whether it is as asked
        for scene_prompt in scene_prompts.make(task, 2 if options.smoke else options.per_task, background):
            for shown, right in ((scene_prompt, True), (spoilt(scene_prompt, scene_prompts, rng), False)):
                scene = scene_of(shown, drawer, rng)
                if visible(scene, drawer):
                    pairs.append((scene_prompt, scene, right))
        verdicts = []
        for i in range(0, len(pairs), 32):
            part = pairs[i : i + 32]
            painted = painter.paint(batch_of([scene for _, scene, _ in part], vocabulary, lexicon))
            coded = tokenizer.decode(tokenizer.encode(painted, schedule).maps[-1]).clamp(-1, 1)
            found = recognizer.detect(coded)
            verdicts += [
                (scene_prompt.passes(f), right) for (scene_prompt, _, right), f in zip(part, found, strict=True)
            ]
        result[background][task] = share(verdicts)
        print(f"{background:<6} {task:<20} {json.dumps(result[background][task])}", flush=True)
    about = read_about(options.recognizer)
    about["accuracy"] = {**about.get("accuracy", {}), **result}
    if not options.smoke:
        (options.recognizer / "config.json").write_text(json.dumps(about) + "\n")


def share(verdicts: list[tuple[bool, bool]]) -> dict[str, Any]:
    """Of right and of wrong images alike."""
    right = [passed for passed, true in verdicts if true]
    wrong = [not passed for passed, true in verdicts if not true]
    agreed = sum(right) + sum(wrong)
    return {
        "accuracy": agreed / len(verdicts),
        "pictures": len(verdicts),
        "right passed": sum(right) / len(right),
        "wrong failed": sum(wrong) / len(wrong),
    }


if __name__ == "__main__":
    main()
