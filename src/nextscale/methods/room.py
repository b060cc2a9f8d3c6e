"""How many tokens the layers of a scale will keep at most: a guess from earlier scales, and from earlier calls."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

FIRST = 0.25  # a layer's deviation at the first reduced scale, if nothing is known
CHANGE = 0.1  # by how much it will rise to the next one, if nothing is known
ONCE = 0.05  # room for surprises behind what was seen once
LEAST = 0.002  # and behind what was seen more often, beside a share of how much it varied


class Deviations:
    """How the deviations of layers change between two reduced scales. The scale before the first one is 0."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], list[tuple[float, float, int]]] = {}  # lowest, highest, how often
        self.rises: dict[tuple[int, int], list[float]] = {}  # what to expect of each layer: kept, for it is asked often

    def highest(self, before: int, now: int, deviation: Sequence[float]) -> list[float]:
        """Of every layer at scale `now`, if it was `deviation` at scale `before`."""
        rises = self.rises.get((before, now)) or [CHANGE if before else FIRST] * len(deviation)
        return list(map(operator.add, deviation, rises))

    def learn(self, before: int, now: int, old: Sequence[float], new: Sequence[float]) -> None:
        changes = [b - a for a, b in zip(old, new, strict=True)]
        known = self.seen.get((before, now), [(c, c, 0) for c in changes])
        self.seen[before, now] = seen = [
            (min(low, c), max(high, c), often + 1) for c, (low, high, often) in zip(changes, known, strict=True)
        ]
        # The more often it was seen, the less will the next time be beyond.
        self.rises[before, now] = [
            h + LEAST + ((h - low) / math.sqrt(often) if often > 1 else ONCE) for low, h, often in seen
        ]
