"""The settings of a sweep that deserve a name, by one rule for all methods.

A preset is the cheapest setting whose images are near enough to the plain ones on every kind of background. A method
that never comes so near has its nearest setting; what it was measured to lose is stored with it. `faithful` is as near
as `balanced`, but of settings that keep all parts of their method. `auto` is the cheapest of all methods' presets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nextscale.io.writing import as_json, atomic_write
from nextscale.methods.auto import AUTO, LEVELS
from nextscale.methods.base import SCHEMA, Method
from nextscale.methods.compose import Compose
from nextscale.research.evaluate.report import Row
from nextscale.research.evaluate.statistics import ConfidenceInterval

MIN_SSIM = {"balanced": 0.97, "fast": 0.95, "faithful": 0.97}  # mean SSIM to the plain images
MEASURED = ("flops", "tokens", "scenes", "psnr", "ssim")


def choose(settings: Mapping[str, Sequence[Row]], cost: str, least: float) -> str:
    """Choose among one method's settings; each has a row for every kind of background."""
    costs = {name: sum(_number(row, cost) for row in rows) for name, rows in settings.items()}
    nearness = {name: min(_number(row, "ssim") for row in rows) for name, rows in settings.items()}
    enough = [name for name in settings if nearness[name] >= least]
    return min(enough, key=lambda name: costs[name]) if enough else max(settings, key=lambda name: nearness[name])


def presets(
    rows: Sequence[Row],
    methods: Mapping[str, Method | None],
    cost: str,
    model: str,
    where: str,
    faithful: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """File name -> content, as `Method.preset` reads it; `faithful` names the settings that keep all parts."""
    by_method: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        method = methods[row.name]
        if method is not None and not isinstance(method, Compose):
            by_method.setdefault(method.name, {}).setdefault(row.name, []).append(row)
    result = {}
    for name, settings in by_method.items():
        for preset, least in MIN_SSIM.items():
            allowed = settings if preset != "faithful" else {n: r for n, r in settings.items() if n in faithful}
            if not allowed:
                continue
            chosen = choose(allowed, cost, least)
            method = methods[chosen]
            assert method is not None
            measured = {row.background: {k: round(_number(row, k), 4) for k in MEASURED} for row in settings[chosen]}
            about = {"schema": SCHEMA, "name": name, "measured_on": model, "source": where, "measured": measured}
            result[f"{name}-{preset}.json"] = {**about, "fields": method.to_dict()["fields"]}
    if by_method:
        every = {name: rows for settings in by_method.values() for name, rows in settings.items()}
        best = {level: methods[choose(every, cost, MIN_SSIM[level])] for level in LEVELS}
        found = {level: f"{method.name}:{level}" for level, method in best.items() if method is not None}
        result[f"{AUTO}-{model}.json"] = {"schema": SCHEMA, "name": AUTO, "source": where, **found}
    return result


def write_presets(folder: Path, found: Mapping[str, dict[str, Any]]) -> None:
    for name, content in found.items():
        with atomic_write(folder / name) as file:
            file.write(as_json(content))


def _number(row: Row, key: str) -> float:
    value = row.values[key]
    assert value is not None
    return value.value if isinstance(value, ConfidenceInterval) else value
