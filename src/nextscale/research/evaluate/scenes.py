"""Prompts of six tasks, as GenEval asks them, in the embedded model's words, and what a right image of them holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nextscale.checkpoints.locate import ASSETS
from nextscale.research.evaluate.recognizer import Detection

FROZEN = ASSETS / "scenes.json"
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
        return cls(data["task"], data["prompt"], tuple(SceneObject(**t) for t in data["things"]), data["relation"])


def read_scene_prompts(path: Path = FROZEN) -> list[ScenePrompt]:
    """Read the frozen list: as many prompts of every task, in the order of `TASKS`."""
    return [ScenePrompt.from_dict(entry) for entry in json.loads(path.read_text())["asks"]]


def first_per_task(scene_prompts: Sequence[ScenePrompt], per_task: int) -> list[ScenePrompt]:
    """Take the first few of every task."""
    return [a for task in TASKS for a in [a for a in scene_prompts if a.task == task][:per_task]]


def describe(found: Sequence[Detection], scene_prompt: ScenePrompt) -> str:
    """Say what was found; with colors where they were asked for."""
    colored = any(t.color for t in scene_prompt.things)
    words = Counter(f"{d.color} {d.name}" if colored else d.name for d in found)
    return ", ".join(f"{n} {word}" if n > 1 else word for word, n in words.items()) or "nothing"
