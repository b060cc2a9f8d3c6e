"""Lists of settings to measure together: named ones that come with the package, or a file of the user's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nextscale.errors import NextscaleError, choices
from nextscale.io.reading import read_json
from nextscale.methods import Method
from nextscale.methods.naming import PLAIN, parse_method

FOLDER = Path(__file__).parent / "sweeps"
FIELDS = ("schema", "about", "curves", "faithful")


@dataclass(frozen=True)
class Sweep:
    about: str
    curves: dict[str, tuple[str, ...]]  # a line of the figure -> its settings, as `parse_method` reads them
    faithful: tuple[str, ...] = ()  # curves whose settings keep all parts of their method

    @property
    def methods(self) -> dict[str, Method | None]:
        """All of them once, and the plain run first."""
        names = dict.fromkeys((PLAIN, *(name for curve in self.curves.values() for name in curve)))
        return {name: parse_method(name) for name in names}


def sweep_names() -> list[str]:
    return [path.stem for path in sorted(FOLDER.glob("*.json"))]


def read_sweep(name: str) -> Sweep:
    path = FOLDER / f"{name}.json"
    path = path if name in sweep_names() else Path(name)
    if not os.path.isfile(path):
        raise NextscaleError(f"unknown sweep {name!r:.200}; allowed: {choices(sweep_names())}, or a .json file")
    content = read_json(path, "a sweep")
    if not isinstance(content, dict) or not isinstance(content.get("curves"), dict):
        raise NextscaleError(f"{path} is not a sweep: it needs 'curves', {{name: [methods]}}")
    unknown = next((key for key in content if key not in FIELDS), None)
    if unknown is not None:
        raise NextscaleError(f"{path} has the unknown field {unknown!r}; allowed: {choices(FIELDS)}")
    curves = {}
    for curve, entries in content["curves"].items():
        if not isinstance(entries, list) or not entries or not all(isinstance(e, str) for e in entries):
            raise NextscaleError(f'{path}: the curve {curve!r} must be a list of methods, e.g. ["truncate:1"]')
        curves[curve] = tuple(entries)
    faithful = content.get("faithful", [])
    if not isinstance(faithful, list) or not all(name in curves for name in faithful):
        raise NextscaleError(f"{path}: 'faithful' must be a list of its curves: {choices(curves)}")
    sweep = Sweep(str(content.get("about", "")), curves, tuple(faithful))
    if not curves:
        raise NextscaleError(f"{path} has no curve")
    sweep.methods  # noqa: B018 - a wrong method is named before anything is computed
    return sweep
