"""Textured scenes and their captions, drawn at random: what is where, and in which words it is said.

A caption names things, their counts, colors, materials and sizes, a relation and the background. What it does not name
has one kind of value: white background, glossy style, a shape's usual color, no certain size. The layout, exact sizes,
mirroring, light and texture are left to chance, so that every seed gives another picture of the same caption.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from nextscale.engine.schedule import infinity_schedule
from nextscale.text.words import END_TOKEN, Lexicon
from training import scenes as former
from training.scenes import PATTERNS, RELATIONS, STYLES, held_out

HERE = Path(__file__).parent
SLOTS = 10  # things in a scene, at most
TOKENS = 32  # of a caption, padded
KINDS = ("objects", "shapes", "letters")  # of things
COUNTS = ("a", "two", "three", "four", "five", "six", "seven", "eight")
TASKS = ("single", "count", "relation", "pair", "groups", "several")
MIX = (0.30, 0.18, 0.13, 0.08, 0.26, 0.05)
CHANCES = (0.56, 0.28, 0.16)  # of objects, shapes, letters
BACKGROUNDS = ("none", "place", *PATTERNS)
BEHIND = (0.22, 0.44, 0.20, 0.07, 0.03, 0.02, 0.02)
SIZES = {  # of a thing, as a share of the picture's side
    None: (0.09, 0.66),
    "tiny": (1 / 16, 0.095),
    "small": (0.11, 0.17),
    "large": (0.62, 0.86),
}
SEEN = 0.08  # the least size where a texture is behind
MARGIN = 0.035
SKY = 0.17  # share of the height that stays free above things that stand on the ground
APART = 0.86  # the share of its cell that a thing takes at most, so that things never touch
ARTICLES = {"hourglass": "an", "unicorn": "a", "ufo": "a"}  # against the first letter
LETTERED = frozenset(  # what is wrong in a mirror
    ("stop sign", "taxi", "police car", "ambulance", "clock", "alarm clock", "watch", "keyboard", "dice", "earth")
)


@dataclass(frozen=True)
class Item:
    """Some copies of one thing."""

    kind: str  # of KINDS
    index: int  # among its kind
    count: int = 1
    color: int | None = None
    material: int | None = None
    size: str | None = None
    named: bool = True  # whether the caption says the color


@dataclass(frozen=True)
class Spot:
    """Where a copy is, in sides of the square picture; mirrored or not."""

    x: float
    y: float
    size: float
    mirrored: bool = False


@dataclass(frozen=True)
class Scene:
    task: str
    relation: str | None
    items: tuple[Item, ...]
    style: int
    background: str  # a pattern or a place
    colors: tuple[int, int]  # of the background
    caption: str
    ratio: float = 1.0  # height / width
    spots: tuple[Spot, ...] = ()  # of every copy
    light: float = 0.0  # where it comes from, an angle
    chance: tuple[float, ...] = ()  # numbers in 0..1 that choose the background's texture

    @property
    def copies(self) -> Iterator[tuple[Item, Spot]]:
        owners = [item for item in self.items for _ in range(item.count)]
        return zip(owners, self.spots, strict=True)


def canvas(ratio: float, scales: int = 13) -> tuple[float, float]:
    """Width and height of a picture in sides of the square one, which has about its area."""
    (h, w), square = infinity_schedule(ratio).grids[scales - 1], infinity_schedule(1.0).grids[scales - 1][0]
    return w / square, h / square


def spelled(kind: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Letters, or digits, as entries of the vocabulary: "letter a", of which "two letters A" is the plural."""
    digits = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    for sign in kind["signs"]:
        heads = dict.fromkeys((kind["name"], *kind["say"]))
        said = [sign, *([digits[int(sign)]] if sign.isdigit() else [])]
        phrases = [f"{head}{end} {s}" for s in said for head in heads for end in ("", "s")]
        name, plural = f"{kind['name']} {sign}", f"{kind['plural']} {sign}"
        also = [p for p in phrases if p not in (name, plural)]
        yield {"name": name, "plural": plural, "also": also, "sign": sign, "say": kind["say"], "colour": "black"}


def read_vocabulary() -> dict[str, Any]:
    """Everything that can be said: the former vocabulary, of which an entry of the same name is replaced, and more."""
    vocabulary, more = former.read_vocabulary(), json.loads((HERE / "vocabulary.json").read_text())
    more["letters"] = [entry for kind in more["letters"] for entry in spelled(kind)]
    for kind, entries in more.items():
        named = {entry["name"]: entry for entry in vocabulary.get(kind, ())}
        if kind == "filler":
            entries = [{"name": e["name"], "also": [*named[e["name"]]["also"], *e["also"]]} for e in entries]
        named.update((entry["name"], entry) for entry in entries)
        vocabulary[kind] = [entry for entry in named.values() if not entry.get("gone")]
    return vocabulary


def words_of(vocabulary: dict[str, Any]) -> dict[str, Any]:
    """The part of it that the package ships. A material that is a pattern, too, is one word for both."""
    patterns = {entry["name"] for entry in vocabulary["backgrounds"]}
    materials = [entry for entry in vocabulary["materials"] if entry["name"] not in patterns]
    return former.words_of({**vocabulary, "materials": materials})


def kind_of(scene: Scene) -> str:
    """What a tokenizer is measured on apart."""
    plain = scene.background in PATTERNS and all(item.material is None for item in scene.items)
    return "flat" if plain else "textured"


def split(n: int, parts: int) -> list[int]:
    """n in parts that differ by one at most."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def arrange(
    rng: np.random.Generator, n: int, box: tuple[float, float, float, float], sizes: tuple[float, float]
) -> list[tuple[float, float, float]]:
    """x, y and size of n copies in rows somewhere in a box (left, top, width, height): of one size, none touching."""
    left, top, width, height = box
    low, high = sizes
    fits = {rows: APART * min(width / math.ceil(n / rows), height / rows) for rows in range(1, n + 1)}
    best = min(high, max(fits.values()))
    rows = int(rng.choice([r for r, fit in fits.items() if min(fit, high) >= 0.85 * best]))
    fit = min(high, fits[rows])
    size = rng.uniform(min(max(low, 0.7 * fit), fit), fit)
    counts = split(n, rows)
    rng.shuffle(counts)
    # Copies keep together: their cells are at most half as large again as they are, small ones twice.
    loose = 1.5 if size > 0.2 else 2.0
    across = min(width / max(counts), loose * size / APART)
    down = min(height / rows, loose * size / APART)
    x0 = left + rng.beta(2, 2) * (width - across * max(counts))
    y0 = top + rng.beta(2, 2) * (height - down * rows)
    spots = []
    for row, count in enumerate(counts):
        shift = (max(counts) - count) * across / 2
        for column in range(count):
            dx, dy = (rng.uniform(-1, 1) * min((cell - size / APART) / 2, 0.3 * size) for cell in (across, down))
            spots.append((x0 + shift + (column + 0.5) * across + dx, y0 + (row + 0.5) * down + dy, size))
    return spots


class Scenes:
    """Draws scenes from the vocabulary."""

    def __init__(self, vocabulary: dict[str, Any], unseen: bool = False, mix: Sequence[float] = MIX) -> None:
        """`unseen`: the held-out pairs only, instead of all others. `mix`: how often each task comes."""
        self.vocabulary, self.unseen, self.mix = vocabulary, unseen, tuple(mix)
        self.things = [vocabulary[kind] for kind in KINDS]
        self.colors = [c["name"] for c in vocabulary["colours"]]
        self.materials = vocabulary["materials"]
        self.places = {b["name"]: b for b in vocabulary["backgrounds"] if "say" in b}
        self.white = self.colors.index("white")

    def thing(self, item: Item) -> dict[str, Any]:
        return self.vocabulary[item.kind][item.index]

    def draw(self, rng: np.random.Generator, task: str | None = None, ratio: float = 1.0) -> Scene:
        task = task or str(rng.choice(TASKS, p=self.mix))
        background, colors, where = self.background(rng)
        relation = str(rng.choice(list(RELATIONS))) if task in ("relation", "groups") else None
        if task == "groups" and rng.random() < 0.4:
            relation = "and"
        counts = self.counts(rng, task)
        items = self.items(rng, counts, background, colors)
        style = int(rng.choice(3, p=(0.5, 0.25, 0.25))) if any(item.kind == "objects" for item in items) else 0
        what = self.say(rng, task, relation, items, style)
        caption = f"{where}, {what}" if where and rng.random() < 0.3 else f"{what} {where}".strip()
        return self.arranged(rng, Scene(task, relation, items, style, background, colors, caption, ratio))

    def counts(self, rng: np.random.Generator, task: str) -> list[int]:
        if task == "count":
            return [int(rng.choice(range(2, 9), p=(0.18, 0.17, 0.17, 0.13, 0.13, 0.11, 0.11)))]
        if task == "several":
            return [1] * int(rng.integers(3, 5))
        if task == "groups":
            while True:
                a, b = (int(rng.choice(range(1, 7), p=(0.24, 0.24, 0.2, 0.16, 0.09, 0.07))) for _ in range(2))
                if 3 <= a + b <= SLOTS - 1:
                    return [a, b]
        return [1] if task == "single" else [1, 1]

    def background(self, rng: np.random.Generator) -> tuple[str, tuple[int, int], str]:
        kind = str(rng.choice(BACKGROUNDS, p=BEHIND))
        a, b = (int(c) for c in rng.choice(len(self.colors), 2, replace=False))
        article = "an" if self.colors[a][0] in "aeiou" else "a"
        if kind == "none":
            white = ("", "", "", "", "on a white background", "on white")
            return "plain", (self.white, self.white), str(rng.choice(white))
        if kind == "place":
            name = str(rng.choice(list(self.places)))
            return name, (a, a), str(rng.choice(self.places[name]["say"]))
        if kind == "plain":
            return kind, (a, a), f"on {article} {self.colors[a]} background"
        if kind == "gradient":
            return kind, (a, b), f"on {article} {self.colors[a]} to {self.colors[b]} gradient background"
        if a == self.white:  # its stripes would be white on white
            a, article = b, "an" if self.colors[b][0] in "aeiou" else "a"
        return kind, (a, a), f"on {article} {self.colors[a]} {kind} background"

    def hidden(self, background: str, colors: tuple[int, int]) -> set[str]:
        """Colors and materials that could not be seen there."""
        if background in self.places:
            return set(self.places[background].get("like", ()))
        return {self.colors[c] for c in colors}

    def items(
        self, rng: np.random.Generator, counts: list[int], background: str, colors: tuple[int, int]
    ) -> tuple[Item, ...]:
        """Different things, none of them looking like the background."""
        hidden = self.hidden(background, colors)
        while True:
            items = [self.item(rng, count, len(counts) == 1) for count in counts]
            if len({(item.kind, item.index) for item in items}) < len(items) or not self.allowed(items):
                continue
            fine = [i for i in items if i.size == "tiny" and (i.material is not None or i.kind == "letters")]
            if background in self.places and fine:  # nobody could tell what it is
                continue
            if all(hidden.isdisjoint(self.looks(item)) for item in items):
                return tuple(items)

    def item(self, rng: np.random.Generator, count: int, alone: bool) -> Item:
        which = int(rng.choice(3, p=CHANCES))
        kind, index = KINDS[which], int(rng.integers(len(self.things[which])))
        size = str(rng.choice(("", "tiny", "small", "large"), p=(0.78, 0.09, 0.09, 0.04))) or None
        if size == "large" and not (alone and count == 1):
            size = None
        color, material, named = None, None, True
        if rng.random() < (0.25 if kind == "objects" else 0.38):
            material = int(rng.integers(len(self.materials)))
            if self.materials[material].get("tints") and rng.random() < 0.6:
                color = int(rng.integers(len(self.colors)))
        elif kind == "objects":
            color = int(rng.integers(len(self.colors))) if rng.random() < 0.1 else None
        else:
            named = rng.random() < 0.88
            usual = self.colors.index(self.things[which][index]["colour"])
            color = int(rng.integers(len(self.colors))) if named else usual
        return Item(kind, index, count, color, material, size, named)

    def looks(self, item: Item) -> set[str]:
        """The colors and the material that can be seen of it."""
        looks = set() if item.color is None else {self.colors[item.color]}
        if item.material is not None:
            material = self.materials[item.material]
            looks |= {material["name"], *(material.get("like", ()) if item.color is None else ())}
        return looks

    def allowed(self, items: list[Item]) -> bool:
        objects = [item.index for item in items if item.kind == "objects"]
        pairs = [held_out(a, b) for i, a in enumerate(objects) for b in objects[i + 1 :]]
        if self.unseen and len(items) > 1:
            return bool(pairs) and all(pairs)
        return not any(pairs)

    def name(self, rng: np.random.Generator, item: Item, style: str) -> str:
        thing = self.thing(item)
        noun = thing["name"] if item.count == 1 else thing["plural"]
        if item.kind == "letters":
            noun = f"{rng.choice(thing['say'])}{'' if item.count == 1 else 's'} {thing['sign']}"
        elif item.count == 1 and thing.get("also") and rng.random() < 0.15:
            noun = str(rng.choice(thing["also"]))
        words = [word for word in (item.size, style if item.kind == "objects" else "") if word]
        if item.size in ("small", "large") and rng.random() < 0.3:
            words[0] = {"small": "little", "large": "big"}[item.size]
        if item.color is not None and item.named:
            words.append(self.colors[item.color])
        after = ""
        if item.material is not None:
            material = self.materials[item.material]
            if "made" in material and rng.random() < 0.12:
                after = f" made of {material['made']}"
            else:
                words.append(material["name"])
        number = "one" if item.count == 1 and rng.random() < 0.08 else COUNTS[item.count - 1]
        if item.kind == "letters" and item.count == 1 and not words:
            number = "the"
        elif item.count > 1 and rng.random() < 0.08:
            number = str(item.count)
        first = (words or [noun])[0]
        if number == "a":
            number = ARTICLES.get(first, "an" if first[0] in "aeiou" else "a")
        return " ".join((number, *words, noun)) + after

    def say(
        self, rng: np.random.Generator, task: str, relation: str | None, items: tuple[Item, ...], style: int
    ) -> str:
        drawn = any(item.kind == "objects" for item in items)  # in a style
        said = STYLES[style] if style or (drawn and rng.random() < 0.3) else ""
        where = int(rng.integers(3))  # before the noun, before all, after all
        names = [self.name(rng, item, said if where == 0 else "") for item in items]
        if task == "several":
            text = ", ".join(names[:-1]) + f" and {names[-1]}"
        elif relation in RELATIONS:
            words = str(rng.choice(RELATIONS[relation]))
            first, second = names
            is_are = "is" if items[0].count == 1 else "are"
            turned = where != 1 and rng.random() < 0.2
            text = f"{words} {second} {is_are} {first}" if turned else f"{first} {words} {second}"
        elif len(names) == 2:
            text = f"{names[0]} {rng.choice(('and', 'and', 'next to', 'beside'))} {names[1]}"
        else:
            text = names[0]
        if said and where == 1:
            text = f"{said} picture of {text}"
        elif said and where == 2:
            text = f"{text} in {said} style"
        return text

    def arranged(self, rng: np.random.Generator, scene: Scene) -> Scene:
        """The scene with everything drawn again that its caption leaves open."""
        width, height = canvas(scene.ratio)
        place = self.places.get(scene.background)
        top = MARGIN if place is None or place.get("shadow") != "ground" else SKY * height
        box = (MARGIN, top, width - 2 * MARGIN, height - MARGIN - top)
        sizes = {name: (low if place is None else max(low, SEEN), high) for name, (low, high) in SIZES.items()}
        found: list[tuple[float, float, float]] = []
        if len(scene.items) == 1:
            found = arrange(rng, scene.items[0].count, box, sizes[scene.items[0].size])
        elif scene.task == "several":
            cells = arrange(rng, len(scene.items), box, sizes[None])
            for item, (x, y, size) in zip(scene.items, cells, strict=True):
                low, high = sizes[item.size]
                found.append((x, y, size if item.size is None else rng.uniform(low, min(high, size))))
        else:
            relation = scene.relation
            if relation not in RELATIONS:  # "and" leaves that open; side by side where the picture is not upright
                options = ("left of", "right of", "above", "below")
                relation = str(rng.choice(options, p=(0.3, 0.3, 0.2, 0.2) if height <= width else (0.2, 0.2, 0.3, 0.3)))
            for item, part in zip(scene.items, self.halves(rng, relation, scene.items, box), strict=True):
                found += arrange(rng, item.count, part, sizes[item.size])
        owners = [item for item in scene.items for _ in range(item.count)]
        spots = []
        for item, (x, y, size) in zip(owners, found, strict=True):
            fixed = item.kind == "letters" or self.thing(item)["name"] in LETTERED
            spots.append(Spot(x, y, size, not fixed and rng.random() < 0.5))
        if rng.random() < 0.6:  # the copies of a thing mostly look the same way
            spots = [replace(s, mirrored=spots[owners.index(o)].mirrored) for o, s in zip(owners, spots, strict=True)]
        light = float(rng.uniform(-0.85, -0.15) * math.pi)  # from above, from the left to the right
        return replace(scene, spots=tuple(spots), light=light, chance=tuple(rng.random(8).tolist()))

    @staticmethod
    def halves(
        rng: np.random.Generator, relation: str, items: Sequence[Item], box: tuple[float, float, float, float]
    ) -> list[tuple[float, float, float, float]]:
        """A part of the box for the first things, and one for the second; larger where there are more."""
        left, top, width, height = box
        first, second = (math.sqrt(i.count) * (0.5 if i.size in ("tiny", "small") else 1.0) for i in items)
        share = float(np.clip(first / (first + second) + rng.uniform(-0.06, 0.06), 0.33, 0.67))
        backwards = relation in ("right of", "below")
        at = 1 - share if backwards else share
        gap = 0.03
        if relation in ("left of", "right of"):
            a, b = width * at - gap / 2, width * (1 - at) - gap / 2
            parts = [(left, top, a, height), (left + width - b, top, b, height)]
        else:
            a, b = height * at - gap / 2, height * (1 - at) - gap / 2
            parts = [(left, top, width, a), (left, top + height - b, width, b)]
        return parts[::-1] if backwards else parts


@dataclass
class Batch:
    """Scenes of one ratio as arrays: what the painter and the text encoder need."""

    thing: Tensor  # [B, SLOTS] index of the sprite, -1 = none: objects style by style, shapes, letters
    tint: Tensor  # [B, SLOTS, 3] in 0..255
    tinted: Tensor  # [B, SLOTS] whether there is a color
    material: Tensor  # [B, SLOTS], -1 = none
    place: Tensor  # [B, SLOTS, 4] x, y, size, and -1 for mirrored or 1
    light: Tensor  # [B, 2] from where it comes
    background: Tensor  # [B] pattern, or len(PATTERNS) + place
    colors: Tensor  # [B, 2, 3] in 0..255
    chance: Tensor  # [B, 8] in 0..1
    tokens: Tensor  # [B, TOKENS]
    lengths: Tensor  # [B]
    ratio: float = 1.0
    scenes: list[Scene] = field(default_factory=list)


def batch_of(scenes: list[Scene], vocabulary: dict[str, Any], lexicon: Lexicon) -> Batch:
    n, objects, shapes = len(scenes), len(vocabulary["objects"]), len(vocabulary["shapes"])
    rgb = np.array([c["rgb"] for c in vocabulary["colours"]], dtype=np.uint8)
    names = [*PATTERNS, *(b["name"] for b in vocabulary["backgrounds"] if "say" in b)]
    kinds = {name: i for i, name in enumerate(names)}
    thing, material = (np.full((n, SLOTS), -1, dtype=np.int64) for _ in range(2))
    tint, tinted = np.full((n, SLOTS, 3), 255, dtype=np.uint8), np.zeros((n, SLOTS), dtype=bool)
    place = np.zeros((n, SLOTS, 4), dtype=np.float32)
    tokens, lengths = np.full((n, TOKENS), END_TOKEN, dtype=np.int64), np.zeros(n, dtype=np.int64)
    for i, scene in enumerate(scenes):
        first = {"objects": scene.style * objects, "shapes": 3 * objects, "letters": 3 * objects + shapes}
        for slot, (item, spot) in enumerate(scene.copies):
            place[i, slot] = spot.x, spot.y, spot.size, -1 if spot.mirrored else 1
            thing[i, slot] = first[item.kind] + item.index
            if item.color is not None:
                tint[i, slot], tinted[i, slot] = rgb[item.color], True
            if item.material is not None:
                material[i, slot] = item.material
        ids, unknown = lexicon.parse(scene.caption)
        assert not unknown, f"{scene.caption!r} has unknown words: {unknown}"
        assert len(ids) <= TOKENS, scene.caption
        tokens[i, : len(ids)], lengths[i] = ids, len(ids)
    light = np.array([(math.cos(s.light), math.sin(s.light)) for s in scenes], dtype=np.float32)
    background, colors = np.array([kinds[s.background] for s in scenes]), rgb[np.array([s.colors for s in scenes])]
    chance = np.array([s.chance for s in scenes], dtype=np.float32)
    arrays = (thing, tint, tinted, material, place, light, background, colors, chance, tokens, lengths)
    return Batch(*map(torch.from_numpy, arrays), scenes[0].ratio, scenes)


class SceneStream(IterableDataset):
    """Batches without end, each of one ratio; each worker has its own seed."""

    def __init__(self, seed: int, size: int, mix: Sequence[float], ratios: dict[str, float]) -> None:
        """`ratios`: how often each one comes. Pictures that are not square come in batches of half the size, for
        they are computed without compilation, which takes more memory."""
        self.seed, self.size, self.mix = seed, size, mix
        self.ratios = {float(ratio): share for ratio, share in ratios.items()}

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng((self.seed, worker.id if worker else 0))
        vocabulary = read_vocabulary()
        scenes, lexicon = Scenes(vocabulary, mix=self.mix), Lexicon(words_of(vocabulary))
        while True:
            ratio = float(rng.choice(list(self.ratios), p=list(self.ratios.values())))
            size = self.size if ratio == 1 else max(1, self.size // 2)
            batch = batch_of([scenes.draw(rng, ratio=ratio) for _ in range(size)], vocabulary, lexicon)
            batch.scenes = []  # would be costly to send between processes
            yield batch


def stream(
    seed: int, size: int, workers: int, mix: Sequence[float] = MIX, ratios: dict[str, float] | None = None
) -> Iterator[Batch]:
    scenes = SceneStream(seed, size, mix, ratios or {"1": 1.0})
    return iter(DataLoader(scenes, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None))
