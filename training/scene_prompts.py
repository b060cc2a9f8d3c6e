"""Prompts of the six tasks in GenEval's plain words, drawn the same way every time.

python -m training.scene_prompts    # writes the frozen lists that the package ships, and captions to calibrate with
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from nextscale.research.evaluate.scenes import ALONG, BACKGROUNDS, FROZEN, TASKS, SceneObject, ScenePrompt
from training.scenes import COUNTS, HERE, PLACES, Scenes, held_out, read_vocabulary

PATTERNED = ("striped", "dotted", "checkered", "gradient")  # backgrounds that are full, beside the places
LIKE_PLACES = {  # colors in which things would be hard to see there
    "meadow": ("green", "teal"),
    "beach": ("blue", "yellow"),
    "desert": ("orange", "brown", "yellow"),
    "snow": ("gray",),
    "night": ("black", "blue", "purple", "brown"),
    "sea": ("blue", "teal"),
    "sunset": ("purple", "orange", "black"),
}
PAIRS = ("seen pairs", "unseen pairs")  # beside the six: pairs of objects that training did or did not show together
PER_TASK = {"white": 60, "full": 30}  # of the frozen lists
TUNING_PER_TASK = 12  # of each kind of background
CAPTIONS = HERE.parent / "benchmarks" / "prompts.txt"


class ScenePromptSampler:
    """None names a style."""

    def __init__(self, vocabulary: dict[str, Any], seed: int = 0) -> None:
        self.plurals = {t["name"]: t["plural"] for t in (*vocabulary["objects"], *vocabulary["shapes"])}
        self.objects = [t["name"] for t in vocabulary["objects"]]
        self.shapes = [t["name"] for t in vocabulary["shapes"]]
        # On the white background that captions without one have, nothing white can be seen.
        self.colors = [c["name"] for c in vocabulary["colours"] if c["name"] != "white"]
        self.seed = seed

    def name(self, thing: SceneObject) -> str:
        words = [] if thing.color is None else [thing.color]
        words.append(thing.name if thing.count == 1 else self.plurals[thing.name])
        number = "an" if thing.count == 1 and words[0][0] in "aeiou" else COUNTS[thing.count - 1]
        return " ".join((number, *words))

    def make(self, task: str, count: int, background: str = "white") -> list[ScenePrompt]:
        # Every task has its own numbers, so that a longer one leaves the others as they are.
        rng = np.random.default_rng((self.seed, (*TASKS, *PAIRS).index(task)))
        scene_prompts: dict[str, ScenePrompt] = {}  # every prompt once, while there are others
        for n, drawn in enumerate(itertools.islice(self.draw(task, rng), 10 * count)):
            scene_prompt = self.scene_prompt(task, *drawn)
            if background == "full":
                words = self.background(n, rng, scene_prompt.things)
                scene_prompt = replace(scene_prompt, prompt=f"{scene_prompt.prompt} {words}", background="full")
            scene_prompts.setdefault(scene_prompt.prompt, scene_prompt)
            if len(scene_prompts) == count:
                break
        return list(scene_prompts.values())

    def background(self, n: int, rng: np.random.Generator, things: tuple[SceneObject, ...]) -> str:
        """The words of the n-th background: places and patterns take turns, none hides a thing by its color."""
        shown, kinds = {t.color for t in things}, [*PLACES, *PATTERNED]
        turn = (kinds[(n + i) % len(kinds)] for i in range(len(kinds)))
        kind = next(k for k in turn if shown.isdisjoint(LIKE_PLACES.get(k, ())))
        if kind in PLACES:
            return PLACES[kind]
        a, b = rng.choice([c for c in self.colors if c not in shown], 2, replace=False)
        article = "an" if a[0] in "aeiou" else "a"
        return (
            f"on {article} {a} to {b} gradient background"
            if kind == "gradient"
            else f"on {article} {a} {kind} background"
        )

    def draw(self, task: str, rng: np.random.Generator) -> Iterator[tuple[tuple[SceneObject, ...], str | None]]:
        for i in range(10**9):
            if task == "single object":
                every = [*self.objects, *self.shapes]
                yield from (((SceneObject(every[k]),), None) for k in rng.permutation(len(every)))
            elif task == "colours":
                tinted = [SceneObject(s, 1, c) for s in self.shapes for c in self.colors]
                yield from (((tinted[k],), None) for k in rng.permutation(len(tinted)))
            elif task == "counting":
                yield (SceneObject(self.objects[rng.integers(len(self.objects))], 2 + i % 3),), None
            elif task == "colour attribution":
                a, b = rng.choice(self.shapes, 2, replace=False).tolist()
                first, second = rng.choice(self.colors, 2, replace=False).tolist()
                yield (SceneObject(a, 1, first), SceneObject(b, 1, second)), None
            else:
                a, b = rng.choice(len(self.objects), 2, replace=False).tolist()
                while task in PAIRS and held_out(a, b) != (task == "unseen pairs"):
                    a, b = rng.choice(len(self.objects), 2, replace=False).tolist()
                relation = list(ALONG)[i % 4] if task == "position" else None
                yield (SceneObject(self.objects[a]), SceneObject(self.objects[b])), relation

    def scene_prompt(self, task: str, things: tuple[SceneObject, ...], relation: str | None) -> ScenePrompt:
        text = f" {relation or 'and'} ".join(map(self.name, things))
        return ScenePrompt(task, text, things, relation)


def frozen(vocabulary: dict[str, Any], name: str) -> list[ScenePrompt]:
    """Make one of the frozen lists."""
    if name != "tuning":
        sampler = ScenePromptSampler(vocabulary, seed={"white": 0, "full": 2}[name])
        return [a for task in TASKS for a in sampler.make(task, PER_TASK[name], name)]
    shown = {a.prompt for other in PER_TASK for a in frozen(vocabulary, other)}
    sampler, most = ScenePromptSampler(vocabulary, seed=3), 5 * TUNING_PER_TASK  # some are in the other lists
    made = [[a for a in sampler.make(t, most, b) if a.prompt not in shown] for b in BACKGROUNDS for t in TASKS]
    return [a for group in made for a in group[:TUNING_PER_TASK]]


def captions(vocabulary: dict[str, Any], count: int = 96) -> list[str]:
    """As in training, with backgrounds and styles; none is a prompt of the evaluation but by chance."""
    scenes, rng = Scenes(vocabulary), np.random.default_rng(3 * 10**6)
    found: dict[str, None] = {}
    while len(found) < count:
        found[scenes.draw(rng).caption] = None
    return list(found)


def main() -> None:
    vocabulary = read_vocabulary()
    for name, path in FROZEN.items():
        entries = [json.dumps(a.to_dict()) for a in frozen(vocabulary, name)]
        path.write_text('{"schema": 1, "asks": [\n' + ",\n".join(entries) + "\n]}\n")
        print(f"wrote {path.name}: {len(entries)} prompts")
    CAPTIONS.write_text("\n".join(captions(vocabulary)) + "\n")


if __name__ == "__main__":
    main()
