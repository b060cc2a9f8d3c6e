"""The one exception a user is meant to read."""

from __future__ import annotations

from collections.abc import Iterable


class NextscaleError(ValueError):
    """Something the user gave cannot be used; the message is one sentence that says what is allowed."""


def first_line(error: BaseException) -> str:
    """What another library says, as a part of our sentence."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def choices(values: Iterable[object]) -> str:
    """The allowed values, as they are listed inside an error sentence."""
    return ", ".join(str(v) for v in values)
