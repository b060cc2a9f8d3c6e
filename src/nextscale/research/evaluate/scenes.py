"""Prompts of six tasks, as GenEval asks them, in the embedded model's words, and what a right image of them holds.

There are three frozen lists: `white` and `full`, by their backgrounds, are for tables; `tuning` has prompts of both
kinds, none of which is in the other lists, to choose constants on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nextscale.checkpoints.locate import ASSETS
from nextscale.errors import NextscaleError, choices
from nextscale.research.evaluate.recognizer import Detection

FROZEN = {"white": ASSETS / "scenes.json", "full": ASSETS / "scenes-full.json", "tuning": ASSETS / "scenes-tuning.json"}
BACKGROUNDS = ("white", "full")
TASKS = ("single object", "two objects", "counting", "colours", "position", "colour attribution")
ALONG = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
MIN_DISTANCE = 0.1  # how far centers must lie apart in the asked direction, as a share of the side


@dataclass(frozen=True)
class SceneObject:
    name: str
    count: int = 1
    color: str | None = None  # None: any


@dataclass(frozen=True)
class ScenePrompt:
    task: str
    prompt: str
    things: tuple[SceneObject, ...]
    relation: str | None = None  # of the first to the second
    background: str = "white"  # or "full": it has content of its own

    def passes(self, found: Sequence[Detection]) -> bool:
        """Exactly the asked things, in their colors, at their places."""
        if Counter(d.name for d in found) != Counter({t.name: t.count for t in self.things}):
            return False
        colors = {t.name: t.color for t in self.things if t.color is not None}
        if any(d.color != colors.get(d.name, d.color) for d in found):
            return False
        return self.relation is None or self._placed(found)

    def _placed(self, found: Sequence[Detection]) -> bool:
        first, second = (next(d for d in found if d.name == t.name) for t in self.things)
        right, down = first.x - second.x, first.y - second.y
        x, y = ALONG[self.relation or ""]
        return right * x + down * y >= MIN_DISTANCE and right * x + down * y > abs(right * y + down * x)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ScenePrompt:
        things = tuple(SceneObject(**t) for t in data["things"])
        return cls(data["task"], data["prompt"], things, data["relation"], data.get("background", "white"))


def read_scene_prompts(*names: str) -> list[ScenePrompt]:
    """Read frozen lists one after the other: as many prompts of every task, in the order of `TASKS`."""
    if unknown := next((name for name in names if name not in FROZEN), None):
        raise NextscaleError(f"unknown list of scenes {unknown!r}; allowed: {choices(FROZEN)}")
    lists = [json.loads(FROZEN[name].read_text())["asks"] for name in names or ("white",)]
    return [ScenePrompt.from_dict(entry) for asks in lists for entry in asks]


def first_per_task(scene_prompts: Sequence[ScenePrompt], per_task: int) -> list[ScenePrompt]:
    """Take the first few of every task and kind of background."""
    groups = [[a for a in scene_prompts if a.background == b and a.task == t] for b in BACKGROUNDS for t in TASKS]
    return [a for group in groups for a in group[:per_task]]


def describe(found: Sequence[Detection], scene_prompt: ScenePrompt) -> str:
    """Say what was found; with colors where they were asked for."""
    colored = any(t.color for t in scene_prompt.things)
    words = Counter(f"{d.color} {d.name}" if colored else d.name for d in found)
    return ", ".join(f"{n} {word}" if n > 1 else word for word, n in words.items()) or "nothing"
