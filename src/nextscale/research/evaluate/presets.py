"""The settings of a sweep that deserve a name: `balanced` and `fast` of every method, by one rule for all.

A preset is the cheapest setting whose images are near enough to the plain ones, or a nearer one that costs hardly
more. A method that never comes so near has its nearest setting; what it was measured to lose is stored with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nextscale.io.writing import as_json, atomic_write
from nextscale.methods.base import SCHEMA, Method
from nextscale.methods.compose import Compose
from nextscale.research.evaluate.report import Row
from nextscale.research.evaluate.statistics import ConfidenceInterval

MIN_SSIM = {"balanced": 0.985, "fast": 0.97}  # SSIM to the plain image
COST_SLACK = 1.1  # times the cost


def choose(rows: Sequence[Row], cost: str, least: float) -> Row:
    """Choose among one method's settings."""
    found = sorted((_number(row, cost), -_number(row, "ssim"), n) for n, row in enumerate(rows))
    enough = [f for f in found if -f[1] >= least] or [min(found, key=lambda f: f[1])]
    return rows[min((f for f in enough if f[0] <= enough[0][0] * COST_SLACK), key=lambda f: f[1])[2]]


def presets(
    rows: Sequence[Row], methods: Mapping[str, Method | None], cost: str, model: str, where: str
) -> dict[str, dict[str, Any]]:
    """File name -> content, as `Method.preset` reads it."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        method = methods[row.name]
        if method is not None and not isinstance(method, Compose):
            by_method.setdefault(method.name, []).append(row)
    result = {}
    for name, settings in by_method.items():
        for preset, least in MIN_SSIM.items():
            row = choose(settings, cost, least)
            method = methods[row.name]
            assert method is not None
            measured = {key: round(_number(row, key), 4) for key in ("flops", "tokens", "scenes", "psnr", "ssim")}
            about = {"schema": SCHEMA, "name": name, "measured_on": model, "source": where, "measured": measured}
            result[f"{name}-{preset}.json"] = {**about, "fields": method.to_dict()["fields"]}
    return result


def write_presets(folder: Path, found: Mapping[str, dict[str, Any]]) -> None:
    for name, content in found.items():
        with atomic_write(folder / name) as file:
            file.write(as_json(content))


def _number(row: Row, key: str) -> float:
    value = row.values[key]
    assert value is not None
    return value.value if isinstance(value, ConfidenceInterval) else value
