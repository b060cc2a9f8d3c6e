"""Means with intervals, paired across methods: the same prompts are drawn again for all of them at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
SIDES = (0.025, 0.975)


@dataclass(frozen=True)
class ConfidenceInterval:
    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


class Resampling:
    """Bootstrap over prompts, within each task; all images of a prompt go together."""

    def __init__(self, prompts: Sequence[str], tasks: Sequence[str], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        names, owner = np.unique(np.array(prompts), return_inverse=True)
        task_names, task_of = np.unique(np.array(tasks), return_inverse=True)
        self.tasks = [task_of == t for t in range(len(task_names))]
        self.names, self.prompts = task_names.tolist(), len(names)
        weights = np.zeros((DRAWS, len(names)))
        for mask in self.tasks:
            members = np.unique(owner[mask])
            # How often each of n comes when n are drawn with replacement.
            weights[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), DRAWS)
        self.weights = weights[:, owner]  # [DRAWS, images]

    def mean(self, values: Sequence[float] | np.ndarray) -> ConfidenceInterval:
        """Over all images."""
        v = np.asarray(values, dtype=float)
        return _estimate(float(v.mean()), (self.weights @ v) / self.weights.sum(1))

    def score(self, values: Sequence[float] | np.ndarray, least: float = 0.0) -> ConfidenceInterval:
        """The mean over tasks of their means, as GenEval counts; values lie in `least` to 1."""
        v = np.asarray(values, dtype=float)
        if (v == v[0]).all():
            # Drawing again cannot show what was never seen: as many prompts alike still leave room for this share of
            # others (the exact binomial bound).
            unseen = 1 - (1 - SIDES[1]) ** (1 / self.prompts)
            return ConfidenceInterval(float(v[0]), max(least, float(v[0]) - unseen), min(1.0, float(v[0]) + unseen))
        means = [v[mask].mean() for mask in self.tasks]
        drawn = [(self.weights[:, mask] @ v[mask]) / self.weights[:, mask].sum(1) for mask in self.tasks]
        return _estimate(float(np.mean(means)), np.mean(drawn, axis=0))


def _estimate(value: float, drawn: np.ndarray) -> ConfidenceInterval:
    low, high = np.quantile(drawn, SIDES).tolist()
    return ConfidenceInterval(value, low, high)


def at_cost(curve: Sequence[tuple[float, np.ndarray]], cost: float) -> np.ndarray | None:
    """A curve's quality, image by image, at another cost: linear in the logarithm of the cost.

    `curve` has (mean cost, quality of every image) of several settings. Outside of it there is no answer: None.
    """
    ordered = sorted(curve, key=lambda point: point[0])
    for (a, low), (b, high) in itertools.pairwise(ordered):
        if a <= cost <= b:
            share = 0.0 if a == b else float(np.log(cost / a) / np.log(b / a))
            return np.asarray(low * (1 - share) + high * share)
    return None


def pareto(points: dict[str, tuple[float, float]]) -> list[str]:
    """Names of (cost, quality) that nothing else beats in both, cheapest first."""
    best: list[str] = []
    for name in sorted(points, key=lambda n: (points[n][0], -points[n][1])):
        if not best or points[name][1] > points[best[-1]][1]:
            best.append(name)
    return best
