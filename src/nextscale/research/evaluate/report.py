"""Results of a bench as rows: means, intervals, and how a method does against truncation at equal cost.

White and full backgrounds have rows of their own: what a method does to the one says little about the other.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nextscale.methods.naming import PLAIN
from nextscale.research.evaluate.bench import Cell, Item
from nextscale.research.evaluate.distances import frechet_distance, kernel_distance
from nextscale.research.evaluate.statistics import ConfidenceInterval, Resampling, at_cost

QUALITIES = {"scenes": 1, "psnr": 1, "ssim": 1, "perceptual": -1}  # 1: more is better
COSTS = ("seconds", "flops", "tokens")


@dataclass
class Row:
    name: str
    background: str
    values: dict[str, ConfidenceInterval | float | None]
    tasks: dict[str, float]
    against: dict[str, dict[str, ConfidenceInterval | None]]  # other curve -> quality -> gain at equal cost

    def flat(self) -> dict[str, Any]:
        """Flatten for a table file: an interval becomes three columns."""
        result: dict[str, Any] = {"method": self.name, "background": self.background}
        gains = {f"{q} vs {other}": e for other, found in self.against.items() for q, e in found.items()}
        for key, value in {**self.values, **gains}.items():
            if isinstance(value, ConfidenceInterval):
                result |= {key: value.value, f"{key} low": value.low, f"{key} high": value.high}
            else:
                result[key] = value
        return result | self.tasks


class EvaluationReport:
    def __init__(
        self, items: Sequence[Item], cells: dict[str, Cell], cost: str = "seconds", background: str = ""
    ) -> None:
        """`background`: the items are those of this kind alone."""
        self.items, self.cells, self.cost, self.background = items, cells, cost, background
        self.resampling = Resampling([i.scene_prompt.prompt for i in items], [i.scene_prompt.task for i in items])

    def column(self, name: str, quality: str) -> np.ndarray | None:
        """One value per image."""
        key = "passed" if quality == "scenes" else quality
        found = [r[key] for r in self.cells[name].records]
        return None if any(v is None for v in found) else np.array(found, dtype=float)

    def estimate(self, values: np.ndarray, quality: str) -> ConfidenceInterval:
        return self.resampling.score(values) if quality == "scenes" else self.resampling.mean(values)

    def rows(self, curves: Mapping[str, Sequence[str]] | None = None) -> list[Row]:
        """Make the rows; `curves` are other methods' settings by name, to compare with at equal cost."""
        return [self.row(name, curves or {}) for name in self.cells if name != "reference"]

    def row(self, name: str, curves: Mapping[str, Sequence[str]]) -> Row:
        plain = PLAIN if PLAIN in self.cells else None
        values: dict[str, ConfidenceInterval | float | None] = {}
        for quality in QUALITIES:
            column = self.column(name, quality)
            values[quality] = None if column is None else self.estimate(column, quality)
        if plain and name != plain:
            values["scenes change"] = self.resampling.score(self.passed(name) - self.passed(plain), least=-1.0)
        values |= {cost: self.mean_of(name, cost) for cost in COSTS}
        if plain:
            values["speed"] = self.mean_of(plain, "seconds") / self.mean_of(name, "seconds")
        values |= self.distances(name)
        passed = self.passed(name)
        tasks = {t: float(passed[m].mean()) for t, m in zip(self.resampling.names, self.resampling.tasks, strict=True)}
        against = {other: self.gains(name, points) for other, points in curves.items() if name not in points}
        return Row(name, self.background, values, tasks, against)

    def passed(self, name: str) -> np.ndarray:
        return np.array([r["passed"] for r in self.cells[name].records], dtype=float)

    def mean_of(self, name: str, cost: str) -> float:
        return float(np.mean([r[cost] for r in self.cells[name].records]))

    def gains(self, name: str, points: Sequence[str]) -> dict[str, ConfidenceInterval | None]:
        """Quality above a curve at this method's own cost; a better value is positive, also of distances."""
        here = self.mean_of(name, self.cost)
        result: dict[str, ConfidenceInterval | None] = {}
        for quality, sign in QUALITIES.items():
            mine = self.column(name, quality)
            # The PSNR of equal images is a convention, and no end of a curve.
            usable = [p for p in points if quality != "psnr" or p != PLAIN]
            theirs = [(self.mean_of(p, self.cost), self.column(p, quality)) for p in usable]
            known = [(c, q) for c, q in theirs if q is not None]
            expected = at_cost(known, here) if mine is not None and len(known) == len(theirs) else None
            if mine is None or expected is None:
                result[quality] = None
            else:
                gained = sign * (mine - expected)
                result[quality] = (
                    self.resampling.score(gained, -1.0) if quality == "scenes" else self.resampling.mean(gained)
                )
        return result

    def distances(self, name: str) -> dict[str, ConfidenceInterval | float | None]:
        """Distances to plain images of other seeds: what the method's images look like as a set."""
        mine, other = self.cells[name].features, self.cells.get("reference", Cell([], None)).features
        if mine is None or other is None:
            return {"frechet": None, "kernel": None}
        a, b = torch.from_numpy(mine).double(), torch.from_numpy(other).double()
        return {"frechet": frechet_distance(a, b), "kernel": kernel_distance(a, b)}


def by_background(items: Sequence[Item], cells: dict[str, Cell], cost: str = "seconds") -> list[EvaluationReport]:
    """Make a report for each kind of background."""
    kinds = np.array([i.scene_prompt.background for i in items])
    reports = []
    for kind in dict.fromkeys(kinds.tolist()):
        (chosen,) = np.where(kinds == kind)
        parts = {
            name: Cell([c.records[n] for n in chosen], None if c.features is None else c.features[chosen])
            for name, c in cells.items()
        }
        reports.append(EvaluationReport([items[n] for n in chosen], parts, cost, kind))
    return reports


def as_csv(rows: Sequence[Row]) -> str:
    flat = [row.flat() for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
