"""Data files that come with the package: presets of methods, tables of ratios, fitted decisions."""

from __future__ import annotations

import os
from pathlib import Path

PRESETS = Path(__file__).parent / "presets"


def stored(kind: str, name: str) -> Path:
    """The package's file of that name, or else `name` as a path."""
    path = PRESETS / f"{kind}-{name}.json"
    return path if os.path.exists(path) else Path(name)  # which takes any name, however long


def stored_names(kind: str) -> list[str]:
    return [path.stem.removeprefix(f"{kind}-") for path in sorted(PRESETS.glob(f"{kind}-*.json"))]
