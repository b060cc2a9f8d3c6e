"""Numbers that describe a network: checked when they are made, for they may come from anybody's file."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from nextscale.errors import NextscaleError
from nextscale.io.arguments import short_repr

MAX_WIDTH = 2**20  # of anything that no class limits itself
MAX_BLOCKS = 256  # of a list of modules: four times the deepest network that was published
MAX_SIDE = 1024  # of a grid of tokens
MAX_ITEMS = 64  # of a list of numbers

Limits = dict[str, tuple[int, int]]


class Config:
    """Base of the frozen dataclasses from which networks are made.

    Fields are whole numbers of at least 1, fractions (an epsilon, a share), truth values or lists of whole numbers.
    """

    limits: ClassVar[Limits] = {}  # the least and most of some whole numbers

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, (least, most) = getattr(self, field.name), self.limits.get(field.name, (1, MAX_WIDTH))
            if not _fits(value, str(field.type), least, most):
                wanted = _KINDS[str(field.type)].format(least=least, most=most, items=MAX_ITEMS)
                raise NextscaleError(
                    f"{field.name} = {short_repr(list(value) if isinstance(value, tuple) else value)} is not {wanted}"
                )

    def require_division(self, whole: str, parts: str, multiple: int = 1) -> None:
        """Require that `whole` can be shared equally among `parts`, each a multiple of some number."""
        total, count = getattr(self, whole), getattr(self, parts)
        if total % (count * multiple):
            each = f" of a multiple of {multiple} each" if multiple > 1 else ""
            raise NextscaleError(f"{whole} = {total} cannot be divided into {parts} = {count}{each}")


_KINDS = {
    "int": "a whole number from {least} to {most}",
    "float": "a number from 0 to 1",
    "bool": "true or false",
    "tuple[int, ...]": "a list of 1 to {items} whole numbers from {least} to {most}",
}


def is_whole(value: Any, least: int = 1, most: int = MAX_WIDTH) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: Any, least: float = 0.0, most: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return least <= value <= most and abs(value) <= 1e300  # whole numbers may be larger than any float


def _fits(value: Any, kind: str, least: int, most: int) -> bool:
    if kind == "int":
        return is_whole(value, least, most)
    if kind == "float":
        return is_number(value, 0, 1)
    if kind == "bool":
        return isinstance(value, bool)
    return isinstance(value, tuple) and 0 < len(value) <= MAX_ITEMS and all(is_whole(v, least, most) for v in value)
