"""Prompts of the six tasks in GenEval's plain words, drawn the same way every time.

python -m training.scene_prompts    # writes the frozen list that the package ships, and captions to calibrate with
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from nextscale.research.evaluate.scenes import ALONG, FROZEN, TASKS, SceneObject, ScenePrompt
from training.scenes import COUNTS, HERE, Scenes, held_out, read_vocabulary

PAIRS = ("seen pairs", "unseen pairs")  # beside the six: pairs of objects that training did or did not show together
PER_TASK = 60  # of the frozen list
CAPTIONS = HERE.parent / "benchmarks" / "prompts.txt"


class ScenePromptSampler:
    """None names a background or a style."""

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

    def make(self, task: str, count: int) -> list[ScenePrompt]:
        # Every task has its own numbers, so that a longer one leaves the others as they are.
        rng = np.random.default_rng((self.seed, (*TASKS, *PAIRS).index(task)))
        scene_prompts: dict[str, ScenePrompt] = {}  # every prompt once, while there are others
        for drawn in itertools.islice(self.draw(task, rng), 10 * count):
            scene_prompt = self.scene_prompt(task, *drawn)
            scene_prompts.setdefault(scene_prompt.prompt, scene_prompt)
            if len(scene_prompts) == count:
                break
        return list(scene_prompts.values())

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


def captions(vocabulary: dict[str, Any], count: int = 96) -> list[str]:
    """As in training, with backgrounds and styles; none is a prompt of the evaluation but by chance."""
    scenes, rng = Scenes(vocabulary), np.random.default_rng(3 * 10**6)
    found: dict[str, None] = {}
    while len(found) < count:
        found[scenes.draw(rng).caption] = None
    return list(found)


def main() -> None:
    vocabulary = read_vocabulary()
    scene_prompts = ScenePromptSampler(vocabulary)
    entries = [json.dumps(a.to_dict()) for task in TASKS for a in scene_prompts.make(task, PER_TASK)]
    FROZEN.write_text('{"schema": 1, "asks": [\n' + ",\n".join(entries) + "\n]}\n")
    CAPTIONS.write_text("\n".join(captions(vocabulary)) + "\n")
    print(f"wrote {FROZEN.name}: {len(entries)} prompts")


if __name__ == "__main__":
    main()
