"""`auto`: of all methods the one that was measured to be the best on a model, by the quality asked for."""

from __future__ import annotations

from typing import TypeGuard

from nextscale.errors import NextscaleError, choices
from nextscale.methods.base import read_stored
from nextscale.methods.package_data import stored

AUTO = "auto"
LEVELS = {"balanced": "taper", "fast": "taper:0.12"}  # and what they are on a model without measurements


def best_method(model: str | None, level: str = "balanced") -> str:
    """The method of a level, as `nextscale eval sweep presets` found it (presets/auto-MODEL.json)."""
    if level not in LEVELS:
        raise NextscaleError(f"{AUTO} has no level {level!r}; allowed: {choices(LEVELS)}")
    return str(read_stored(stored(AUTO, model))[level]) if is_measured(model) else LEVELS[level]


def is_measured(model: str | None) -> TypeGuard[str]:
    """Whether the package knows which method is best on a model."""
    return model is not None and stored(AUTO, model).name == f"{AUTO}-{model}.json"
