"""Clip-art scenes and their captions, drawn at random: what is where, and in which words it is said.

A caption decides nearly everything. What it does not name has one fixed value: white background, glossy style, a
shape's usual color. One layout belongs to each count, and only small shifts of place and size are left to chance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from nextscale.text.words import END_TOKEN, Lexicon

HERE = Path(__file__).parent
SLOTS = 4  # objects in a scene, at most
TOKENS = 24  # of a caption, padded
STYLES = ("glossy", "flat", "classic")
PATTERNS = ("plain", "gradient", "striped", "dotted", "checkered")
PLACES = {  # named backgrounds that are images of their own
    "meadow": "in a meadow",
    "beach": "at the beach",
    "desert": "in the desert",
    "snow": "in the snow",
    "night": "at night",
    "sea": "in the sea",
    "sunset": "at sunset",
}
TASKS = ("single", "count", "relation", "pair", "groups", "several")
MIX = (0.42, 0.17, 0.24, 0.07, 0.07, 0.03)
COUNTS = ("a", "two", "three", "four")
RELATIONS = {
    "left of": ("to the left of", "left of", "on the left of"),
    "right of": ("to the right of", "right of", "on the right of"),
    "above": ("above", "over", "on top of"),
    "below": ("below", "under", "beneath"),
}


@dataclass(frozen=True)
class Item:
    """Some copies of one thing: an object, or a shape with a color."""

    index: int  # among the objects, or among the shapes
    count: int = 1
    color: int | None = None  # of a shape; None = an object
    named: bool = True  # whether the caption says the color


@dataclass(frozen=True)
class Scene:
    task: str
    items: tuple[Item, ...]
    style: int
    background: str  # a pattern or a place
    colors: tuple[int, int]  # of the background
    places: tuple[tuple[float, float, float], ...]  # x, y, size of every copy, as shares of the side
    caption: str

    @property
    def copies(self) -> Iterator[tuple[Item, tuple[float, float, float]]]:
        owners = [item for item in self.items for _ in range(item.count)]
        return zip(owners, self.places, strict=True)


def read_vocabulary() -> dict[str, Any]:
    """Everything that can be said, with what only drawing needs (icons, colors)."""
    vocabulary = json.loads((HERE / "vocabulary.json").read_text())
    return {"objects": json.loads((HERE / "concepts.json").read_text()), **vocabulary}


def words_of(vocabulary: dict[str, Any]) -> dict[str, Any]:
    """The part of it that the package ships: names and synonyms."""

    def entry(item: dict[str, Any]) -> dict[str, Any]:
        also = [item["plural"]] if item.get("plural", item["name"]) != item["name"] else []
        return {"name": item["name"], "also": [*also, *item.get("also", ())]}

    return {kind: [entry(item) for item in items] for kind, items in vocabulary.items()}


def kind_of(scene: Scene) -> str:
    """What a tokenizer is measured on apart; scenes of this data are all of one kind."""
    return "flat"


def held_out(a: int, b: int) -> bool:
    """One pair of objects in 25 is never shown together; four objects in ten are in such pairs."""
    low, high = sorted((a, b))
    return (7919 * low + 104729 * high + low * high) % 10 == 0


def row(n: int, size: float, middle: tuple[float, float], across: bool, step: float) -> list[tuple[float, ...]]:
    """n places side by side, or one above the other."""
    shifts = [(i - (n - 1) / 2) * step for i in range(n)]
    x, y = middle
    return [(x + s, y, size) if across else (x, y + s, size) for s in shifts]


def layout(relation: str | None, counts: list[int]) -> list[tuple[float, ...]]:
    """The one arrangement of these counts."""
    total = sum(counts)
    if relation is None:
        if total == 1:
            return [(0.5, 0.5, 0.70)]
        if total == 2:
            return row(2, 0.42, (0.5, 0.5), True, 0.46)
        if total == 3:
            return [(0.5, 0.27, 0.38), *row(2, 0.38, (0.5, 0.72), True, 0.46)]
        return [*row(2, 0.40, (0.5, 0.27), True, 0.46), *row(2, 0.40, (0.5, 0.73), True, 0.46)]
    size = {1: 0.42, 2: 0.38, 3: 0.28}
    step = {1: 0.0, 2: 0.44, 3: 0.31}
    first, second = (0.27, 0.73) if relation in ("left of", "above") else (0.73, 0.27)
    across = relation in ("above", "below")
    places = []
    for n, at in zip(counts, (first, second), strict=True):
        middle = (0.5, at) if across else (at, 0.5)
        places += row(n, size[n], middle, across, step[n])
    return places


class Scenes:
    """Draws scenes from the vocabulary."""

    def __init__(
        self,
        vocabulary: dict[str, Any],
        unseen: bool = False,
        jitter: float = 1.0,
        mix: tuple[float, ...] = MIX,
    ) -> None:
        """`unseen`: the held-out pairs only, instead of all others. `mix`: how often each task comes."""
        self.vocabulary, self.unseen, self.jitter, self.mix = vocabulary, unseen, jitter, mix
        self.objects, self.shapes = vocabulary["objects"], vocabulary["shapes"]
        self.colors = [c["name"] for c in vocabulary["colours"]]
        self.usual = [self.colors.index(s["colour"]) for s in self.shapes]
        self.white = self.colors.index("white")

    def draw(self, rng: np.random.Generator, task: str | None = None) -> Scene:
        task = task or str(rng.choice(TASKS, p=self.mix))
        style = int(rng.choice(3, p=(0.44, 0.28, 0.28)))
        background, colors, where = self.background(rng)
        taken = {colors[0]} if background == "plain" else set()
        relation = None
        if task in ("single", "count"):
            counts = [1 if task == "single" else int(rng.integers(2, 5))]
        elif task == "several":
            counts = [1] * int(rng.integers(3, 5))
        else:
            counts = [1, 1]
            if task == "groups":
                counts = list(((2, 1), (1, 2), (2, 2), (3, 1), (1, 3))[rng.integers(5)])
            relation = "left of" if task == "pair" else str(rng.choice(list(RELATIONS)))
        items = self.items(rng, counts, taken, 0.12 if task == "single" else 0.22)
        what = self.say(rng, task, relation, items, style)
        caption = f"{where}, {what}" if where and rng.random() < 0.3 else f"{what} {where}".strip()
        return Scene(task, items, style, background, colors, self.places(rng, relation, counts), caption)

    def background(self, rng: np.random.Generator) -> tuple[str, tuple[int, int], str]:
        kind = str(rng.choice(("none", "place", *PATTERNS), p=(0.28, 0.14, 0.36, 0.10, 0.04, 0.04, 0.04)))
        a, b = (int(c) for c in rng.choice(len(self.colors), 2, replace=False))
        if kind == "none":
            return "plain", (self.white, self.white), ""
        if kind == "place":
            name = str(rng.choice(list(PLACES)))
            return name, (a, a), PLACES[name]
        if kind == "plain":
            return kind, (a, a), f"on a {self.colors[a]} background"
        if kind == "gradient":
            return kind, (a, b), f"on a {self.colors[a]} to {self.colors[b]} gradient background"
        if a == self.white:  # its stripes would be white on white
            a = b
        return kind, (a, a), f"on a {self.colors[a]} {kind} background"

    def items(self, rng: np.random.Generator, counts: list[int], taken: set[int], shapes: float) -> tuple[Item, ...]:
        """Different things, none in the color of a plain background."""
        while True:
            items = []
            for count in counts:
                if rng.random() < shapes:
                    index, named = int(rng.integers(len(self.shapes))), rng.random() < 0.9
                    color = int(rng.integers(len(self.colors))) if named else self.usual[index]
                    items.append(Item(index, count, color, named))
                else:
                    items.append(Item(int(rng.integers(len(self.objects))), count))
            names = {(item.color is None, item.index) for item in items}
            clash = any(item.color in taken for item in items if item.color is not None)
            if len(names) == len(items) and not clash and self.allowed(items):
                return tuple(items)

    def allowed(self, items: list[Item]) -> bool:
        objects = [item.index for item in items if item.color is None]
        pairs = [held_out(a, b) for i, a in enumerate(objects) for b in objects[i + 1 :]]
        if self.unseen and len(items) > 1:
            return bool(pairs) and all(pairs)
        return not any(pairs)

    def places(
        self, rng: np.random.Generator, relation: str | None, counts: list[int]
    ) -> tuple[tuple[float, float, float], ...]:
        grow = 1 + self.jitter * rng.uniform(-0.06, 0.06)  # all copies alike
        shift = self.jitter * rng.uniform(-0.015, 0.015, (sum(counts), 2))
        spots = layout(relation, counts)
        return tuple((x + dx, y + dy, s * grow) for (x, y, s), (dx, dy) in zip(spots, shift, strict=True))

    def name(self, rng: np.random.Generator, item: Item, style: str) -> str:
        thing = (self.objects if item.color is None else self.shapes)[item.index]
        noun = thing["name"] if item.count == 1 else thing["plural"]
        if item.count == 1 and thing.get("also") and rng.random() < 0.15:
            noun = str(rng.choice(thing["also"]))
        words = [style] if style else []
        if item.color is not None and item.named:
            words.append(self.colors[item.color])
        number = "one" if item.count == 1 and rng.random() < 0.1 else COUNTS[item.count - 1]
        if number == "a" and (words or [noun])[0][0] in "aeiou":
            number = "an"
        return " ".join((number, *words, noun))

    def say(
        self, rng: np.random.Generator, task: str, relation: str | None, items: tuple[Item, ...], style: int
    ) -> str:
        said = STYLES[style] if style or rng.random() < 0.35 else ""
        where = int(rng.integers(3))  # before the noun, before all, after all
        names = [self.name(rng, item, said if where == 0 else "") for item in items]
        if task == "several":
            text = ", ".join(names[:-1]) + f" and {names[-1]}"
        elif task == "pair":
            text = f"{names[0]} {rng.choice(('and', 'next to', 'beside'))} {names[1]}"
        elif relation is not None:
            words = str(rng.choice(RELATIONS[relation]))
            first, second = names
            text = f"{words} {second} is {first}" if rng.random() < 0.15 else f"{first} {words} {second}"
        else:
            text = names[0]
        if said and where == 1:
            text = f"{said} picture of {text}"
        elif said and where == 2:
            text = f"{text} in {said} style"
        return text


@dataclass
class Batch:
    """Scenes as arrays: what the painter and the text encoder need."""

    sprite: Tensor  # [B, SLOTS] index of the sprite, -1 = none; shapes stand behind all objects
    tint: Tensor  # [B, SLOTS, 3] in 0..255
    place: Tensor  # [B, SLOTS, 3] x, y, size
    background: Tensor  # [B] pattern, or len(PATTERNS) + place
    colors: Tensor  # [B, 2, 3] in 0..255
    tokens: Tensor  # [B, TOKENS]
    lengths: Tensor  # [B]
    scenes: list[Scene] = field(default_factory=list)


def batch_of(scenes: list[Scene], vocabulary: dict[str, Any], lexicon: Lexicon) -> Batch:
    n, objects = len(scenes), len(vocabulary["objects"])
    rgb = np.array([c["rgb"] for c in vocabulary["colours"]], dtype=np.uint8)
    kinds = {name: i for i, name in enumerate((*PATTERNS, *PLACES))}
    sprite = np.full((n, SLOTS), -1, dtype=np.int64)
    tint = np.full((n, SLOTS, 3), 255, dtype=np.uint8)
    place = np.zeros((n, SLOTS, 3), dtype=np.float32)
    tokens = np.full((n, TOKENS), END_TOKEN, dtype=np.int64)
    lengths = np.zeros(n, dtype=np.int64)
    for i, scene in enumerate(scenes):
        for slot, (item, spot) in enumerate(scene.copies):
            place[i, slot] = spot
            if item.color is None:
                sprite[i, slot] = scene.style * objects + item.index
            else:
                sprite[i, slot] = len(STYLES) * objects + item.index
                tint[i, slot] = rgb[item.color]
        ids, unknown = lexicon.parse(scene.caption)
        assert not unknown, f"{scene.caption!r} has unknown words: {unknown}"
        assert len(ids) <= TOKENS, scene.caption
        tokens[i, : len(ids)], lengths[i] = ids, len(ids)
    colors = rgb[np.array([s.colors for s in scenes])]
    background = np.array([kinds[s.background] for s in scenes])
    arrays = (sprite, tint, place, background, colors, tokens, lengths)
    return Batch(*map(torch.from_numpy, arrays), scenes)


class SceneStream(IterableDataset):
    """Batches without end; each worker has its own seed, so a run is repeatable for a given number of workers."""

    def __init__(self, seed: int, size: int, jitter: float, mix: tuple[float, ...]) -> None:
        self.seed, self.size, self.jitter, self.mix = seed, size, jitter, mix

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng((self.seed, worker.id if worker else 0))
        vocabulary = read_vocabulary()
        scenes, lexicon = Scenes(vocabulary, jitter=self.jitter, mix=self.mix), Lexicon(words_of(vocabulary))
        while True:
            batch = batch_of([scenes.draw(rng) for _ in range(self.size)], vocabulary, lexicon)
            batch.scenes = []  # would be costly to send between processes
            yield batch


def stream(seed: int, size: int, workers: int, jitter: float = 1.0, mix: tuple[float, ...] = MIX) -> Iterator[Batch]:
    scenes = SceneStream(seed, size, jitter, mix)
    ahead = 4 if workers else None
    return iter(torch.utils.data.DataLoader(scenes, batch_size=None, num_workers=workers, prefetch_factor=ahead))
