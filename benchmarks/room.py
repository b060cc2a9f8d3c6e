"""How well the room for kept tokens is guessed, on the model that comes with the package.

    python benchmarks/room.py [--pictures 24] [--batch 1] [--size 0.25M] [--set alpha=0.9 ...]

With CUDA graphs every layer of a reduced scale has room for a number of tokens that is guessed before. A layer that
wants more makes the scale run twice; room that is not used is computed for nothing. A scale is captured once more if no
graph has enough room and not much more; or if the KV cache, which is as large as the first picture asked for and a
little more, has to grow. Here NOVA runs eagerly, one call after the other, and each guess is compared with what was
kept: no GPU is needed. Pictures of a batch all have as many slots as the one that keeps most.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from nextscale.methods import NOVA
from nextscale.methods.base import Context, Policy, ScalePlan
from nextscale.methods.linkage import KEPT
from nextscale.methods.nova import NOVAPolicy
from nextscale.pipeline import Pipeline
from nextscale.runtime.program import with_room_to_spare
from nextscale.runtime.shelf import Shelf
from nextscale.schedule import Scale

THINGS = (
    "fox",
    "boat",
    "tree",
    "cat",
    "sun",
    "car",
    "apple",
    "bird",
    "snowman",
    "fish",
    "rocket",
    "dog",
    "horse",
    "star",
)
PLACES = ("", " on the sea", " under a tree", " under the moon")


@dataclass
class Captures:
    """What graphs would keep from call to call."""

    shelves: dict[int, Shelf] = field(default_factory=dict)
    rooms: list[int] = field(default_factory=list)  # in the KV cache of every layer; none before the first call is over
    tail: int = 0  # room for the last scale, which layers share
    count: int = 0

    def slots(self, scale: Scale, need: tuple[int, ...], used: list[int], last: bool, images: int) -> tuple[int, ...]:
        left = list(need)
        if self.rooms:
            left = [self.tail if last else room - some for room, some in zip(self.rooms, used, strict=True)]
        if any(n > some for n, some in zip(need, left, strict=True)):
            if last:
                self.tail = max(*need, self.tail + self.tail // 8)
            else:
                self.rooms = [r + max(n - s, r // 8, 0) for r, n, s in zip(self.rooms, need, left, strict=True)]
            self.shelves = {t: shelf for t, shelf in self.shelves.items() if last and t <= scale.index}
            return self.slots(scale, need, used, last, images)
        shelf = self.shelves.setdefault(scale.index + 1, Shelf(images))
        before = len(shelf.wasted)
        slots = shelf.slots(need, left, scale.tokens)
        self.count += len(shelf.wasted) - before
        return slots

    def called(self, used: list[int], last: list[int]) -> None:
        """A call is over that used so many entries before its last scale, and at it."""
        if not self.rooms:
            self.rooms = list(map(with_room_to_spare, used))
            self.tail = with_room_to_spare(max(last))
            self.shelves.clear()


@dataclass(frozen=True)
class Guessing(NOVA):
    """NOVA that learns from call to call, as it does in graphs."""

    experience: dict[str, Any] = field(default_factory=dict, compare=False)
    captures: Captures = field(default_factory=Captures, compare=False)

    def start(self, context: Context) -> Policy:
        policy = GuessingPolicy(context, self)
        policy.experience = self.experience
        return policy


class GuessingPolicy(NOVAPolicy):
    method: Guessing

    def __init__(self, context: Context, method: Guessing) -> None:
        super().__init__(context, method)
        self.guessed: dict[int, tuple[int, ...]] = {}

    def kept(self, t: int) -> list[list[int]]:
        """Tokens that every layer of a scale kept, of every picture."""
        if t in self.noted:
            return [list(map(int, layer)) for layer in self.noted[t][1]["layers"][:, KEPT].tolist()]
        return [[list(self.context.schedule)[t - 1].tokens] * self.context.images] * self.context.depth

    def wanted(self, t: int) -> list[int]:
        """By the picture that kept most."""
        return list(map(max, self.kept(t)))

    def used(self, scales: int) -> list[int]:
        """Entries in the cache of every layer."""
        return [sum(each) for each in zip(*map(self.wanted, range(1, scales + 1)), strict=True)]

    def begin_scale(self, scale: Scale) -> ScalePlan:
        plan = super().begin_scale(scale)
        if plan.slots:
            last = scale.index == len(self.context.schedule) - 1
            slots = self.method.captures.slots(scale, plan.slots, self.used(scale.index), last, self.context.images)
            self.guessed[scale.index + 1] = slots
        return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=24)
    parser.add_argument("--batch", type=int, default=1, help="pictures of a call")
    parser.add_argument("--size", default="0.25M", help="pixel budget")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=NUMBER", help="of NOVA")
    options = parser.parse_args()
    numbers = {name: float(value) for name, value in (pair.split("=") for pair in options.set)}
    pipe = Pipeline.from_pretrained(progress_bar=False)
    method = Guessing(**numbers)
    print(f"{pipe.spec.name}, {options.size}, batch {options.batch}, {method.name} {numbers or ''}")
    print(f"{'pictures':>9} {'reduced scales':>15} {'run again':>10} {'captured':>9} {'slots / kept':>13}")
    step, batch = max(4, options.batch), options.batch
    for first in range(0, options.pictures, step):
        scales = again = slots = kept = 0
        before = method.captures.count
        end = min(first + step, options.pictures)
        for begin in range(first, end, batch):
            which = range(begin, min(begin + batch, end))
            prompts = [f"a {THINGS[n % len(THINGS)]}{PLACES[n // 5 % len(PLACES)]}" for n in which]
            call = {"method": method, "pixel_budget": options.size, "output_type": "latent"}
            policy = pipe(prompts, seed=list(which), **call).trace.policy
            last = len(policy.context.schedule)
            method.captures.called(policy.used(last - 1), policy.wanted(last))
            for t, room in policy.guessed.items():
                scales += 1
                again += any(w > r for w, r in zip(policy.wanted(t), room, strict=True))
                slots, kept = slots + sum(room) * len(prompts), kept + sum(map(sum, policy.kept(t)))
        captured = method.captures.count - before
        line = f"{first + 1:>4}-{end:<4} {scales:>15} {again:>10} {captured:>9} {slots / max(kept, 1):>13.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
