"""Which of the captured graphs of a scale is taken, and when another one is captured.

A graph has room for some tokens in each layer, its slots. Slots that nobody needs are computed for nothing, and to
capture a graph of the right size costs as much as many scales. So the first one has some room to spare, because the
next picture will need other slots; and one that is too large is taken until as much has been wasted as another costs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from nextscale.runtime.recorded import Captured

Slots = tuple[int, ...]  # of every layer; () = room for all tokens

STEP = 8  # slots are rounded up to a multiple of it
SPARE = 1.1  # times the slots that are needed, for a graph that other pictures should fit into
COST = 6  # of a capture, in scales of one picture and the right size
MOST = 32  # graphs of a scale: those that were not taken for longest make room for others


class Shelf:
    """The graphs of one scale, by their slots."""

    def __init__(self, images: int = 1) -> None:
        self.cost = COST / images
        self.graphs: dict[Slots, Captured] = {}
        self.wasted: dict[Slots, float] = {}  # by graphs that were taken for want of smaller ones

    def slots(self, need: Slots, left: Sequence[int], tokens: int) -> Slots:
        """Of the graph that has to be taken. If there is none yet, it has to be captured.

        `left` is the room in each layer's cache, which only those tokens are worth enlarging that are needed.
        """
        slots = self._choose(need, left, tokens)
        self.wasted[slots] = self.wasted.pop(slots)  # the newest last
        if len(self.wasted) > MOST:
            oldest = next(iter(self.wasted))
            del self.wasted[oldest]
            self.graphs.pop(oldest, None)
        return slots

    def _choose(self, need: Slots, left: Sequence[int], tokens: int) -> Slots:
        fitting = [s for s in self.wasted if all(map(operator.le, need, s)) and all(map(operator.le, s, left))]
        if not fitting:
            return self._new([math.ceil(SPARE * n) for n in need], need, left, tokens)
        slots = min(fitting, key=sum)
        right = sum(need) + STEP / 2 * len(need)
        self.wasted[slots] += max(sum(slots) / max(right, 1) - 1, 0)
        if self.wasted[slots] <= self.cost:
            return slots
        self.wasted[slots] = 0
        return self._new(need, need, left, tokens)

    def _new(self, wanted: Sequence[int], need: Slots, left: Sequence[int], tokens: int) -> Slots:
        room = [some // STEP * STEP for some in left]
        slots = tuple([min(max(min(round_up(w), r), n), tokens) for w, n, r in zip(wanted, need, room, strict=False)])
        self.wasted[slots] = 0
        return slots


def round_up(n: int) -> int:
    """By a thirty-second at most, or to a multiple of 8."""
    step = max(2 ** max(n.bit_length() - 6, 0), STEP)
    return -(-n // step) * step
