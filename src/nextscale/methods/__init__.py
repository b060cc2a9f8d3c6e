"""The methods, by name."""

from __future__ import annotations

from typing import Any

from nextscale.errors import NextscaleError, choices
from nextscale.methods.base import Method, check_stored
from nextscale.methods.compose import Compose
from nextscale.methods.drop_guidance import DropGuidance
from nextscale.methods.fastvar import FastVAR
from nextscale.methods.ld_pruning import LDPruning
from nextscale.methods.nova import NOVA
from nextscale.methods.random_selection import RandomSelection
from nextscale.methods.skipvar import SkipVAR
from nextscale.methods.sparsevar import SparseVAR
from nextscale.methods.taper import Taper
from nextscale.methods.toprovar import ToProVAR
from nextscale.methods.truncate import Truncate

METHODS: dict[str, type[Method]] = {
    m.name: m
    for m in (
        NOVA,
        ToProVAR,
        SparseVAR,
        FastVAR,
        SkipVAR,
        LDPruning,
        Taper,
        DropGuidance,
        Truncate,
        RandomSelection,
    )
}

__all__ = [
    "METHODS",
    "NOVA",
    "Compose",
    "DropGuidance",
    "FastVAR",
    "LDPruning",
    "Method",
    "RandomSelection",
    "SkipVAR",
    "SparseVAR",
    "Taper",
    "ToProVAR",
    "Truncate",
    "from_dict",
    "get_method",
]


def get_method(name: str) -> type[Method]:
    if name not in METHODS:
        raise NextscaleError(f"unknown method {name!r}; allowed: {choices(METHODS)}")
    return METHODS[name]


def from_dict(content: dict[str, Any]) -> Method:
    """The inverse of `Method.to_dict`."""
    content = check_stored(content, "the method")
    if content["name"] == Compose.name:
        return Compose(tuple(from_dict(part) for part in content.get("parts", ())))
    fields = dict(content.get("fields", {}))
    if isinstance(fields.get("like"), dict):
        fields["like"] = from_dict(fields["like"])
    return get_method(content["name"]).from_fields(fields)
