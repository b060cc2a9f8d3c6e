"""How uncertain the cells of a model's images are, scale by scale: what `nextscale calibrate taper` writes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nextscale.errors import NextscaleError, choices
from nextscale.io.reading import read_json
from nextscale.methods.package_data import stored, stored_names

KIND = "entropies"


class Spending(NamedTuple):
    """What came of a budget, in the mean."""

    asked: float
    spent: float
    ssim: float  # to the plain images


@dataclass(frozen=True)
class TypicalEntropies:
    scales: tuple[tuple[float, tuple[float, ...]], ...]  # relative scale t / T -> evenly spaced quantiles, in nats
    spendings: tuple[Spending, ...] = ()  # in the order of what was asked

    @classmethod
    def read(cls, name: str) -> TypicalEntropies:
        path = stored(KIND, name)
        if path.suffix != ".json":
            have = choices(stored_names(KIND)) or "none"
            raise NextscaleError(f"unknown entropies {name!r:.200}; allowed: {have}, or a .json file")
        content = read_json(path, "entropies")
        try:
            scales = [(float(s["at"]), tuple(map(float, s["quantiles"]))) for s in content["scales"]]
            spendings = [Spending(*(float(s[key]) for key in Spending._fields)) for s in content["spendings"]]
            numbers = [x for at, quantiles in scales for x in (at, *quantiles)] + [x for s in spendings for x in s]
            if not scales or not all(map(math.isfinite, numbers)):
                raise ValueError("a number is missing")
            if any(len(q) < 2 or list(q) != sorted(q) for _, q in scales):
                raise ValueError("quantiles must rise")
            if any(b.spent <= a.spent or b.asked <= a.asked for a, b in itertools.pairwise(spendings)):
                raise ValueError("spendings must rise")
        except (KeyError, TypeError, ValueError) as error:
            raise NextscaleError(f"{path} holds no entropies of `nextscale calibrate taper`: {error}") from None
        return cls(tuple(sorted(scales)), tuple(spendings))

    def threshold(self, at: float, share: float) -> float:
        """The entropy that this share of all cells of a relative scale exceeds."""
        if share >= 1:
            return -1.0
        quantiles = min(self.scales, key=lambda scale: abs(scale[0] - at))[1]
        return _between(1 - share, [n / (len(quantiles) - 1) for n in range(len(quantiles))], quantiles)

    def asked_for(self, budget: float) -> float:
        """What has to be asked for so that this is spent in the mean."""
        spent, asked = [s.spent for s in self.spendings], [s.asked for s in self.spendings]
        return _between(budget, [0.0, *spent, 1.0], [0.0, *asked, 1.0])

    def budget_of(self, quality: float) -> float:
        """The least budget of which so much SSIM is expected."""
        if not self.spendings:
            raise NextscaleError("taper: these entropies do not tell what a quality costs; calibrate again")
        ssim = list(itertools.accumulate((s.ssim for s in self.spendings), max))
        return _between(quality, [*ssim, 1.0], [*(s.spent for s in self.spendings), 1.0])


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate linearly between points in order; beyond the ends, the value there."""
    n = bisect.bisect_left(xs, x)
    if n == 0 or n == len(xs):
        return ys[0] if n == 0 else ys[-1]
    weight = (x - xs[n - 1]) / (xs[n] - xs[n - 1])
    return ys[n - 1] + weight * (ys[n] - ys[n - 1])
