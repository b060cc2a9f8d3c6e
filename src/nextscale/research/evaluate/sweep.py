"""Lists of settings to measure together: named ones that come with the package, or a file of the user's."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from nextscale.errors import NextscaleError, choices
from nextscale.io.reading import read_json
from nextscale.methods import Method
from nextscale.methods.naming import PLAIN, parse_method
from nextscale.methods.package_data import stored
from nextscale.methods.typical_entropies import KIND

logger = logging.getLogger(__name__)

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
    is_ours = name in sweep_names()
    path = path if is_ours else Path(name)
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
    if is_ours:
        curves = _calibrated(name, curves)
    faithful = content.get("faithful", [])
    if not isinstance(faithful, list) or not all(name in curves for name in faithful):
        raise NextscaleError(f"{path}: 'faithful' must be a list of its curves: {choices(curves)}")
    sweep = Sweep(str(content.get("about", "")), curves, tuple(faithful))
    if not curves:
        raise NextscaleError(f"{path} has no curve")
    sweep.methods  # noqa: B018 - a wrong method is named before anything is computed
    return sweep


def _calibrated(name: str, curves: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The curves without settings whose entropies the package does not have yet."""
    named = {entry: re.search(r"\bentropies=([\w-]+)", entry) for entries in curves.values() for entry in entries}
    missing = [entry for entry, found in named.items() if found and not stored(KIND, found[1]).is_file()]
    if missing:
        logger.warning(
            "the sweep %s leaves out %s: `nextscale calibrate taper` was not run for them", name, ", ".join(missing)
        )
    left = {curve: tuple(entry for entry in entries if entry not in missing) for curve, entries in curves.items()}
    return {curve: entries for curve, entries in left.items() if entries}
