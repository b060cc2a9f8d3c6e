"""The one exception a user is meant to read."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_WORD, CUT_WORD = 200, 80  # a path may be long, but nobody reads a word of 10,000 letters
MAX_SENTENCE = 1000


class NextscaleError(ValueError):
    """Something the user gave cannot be used; the message is one sentence that says what is allowed."""

    def __init__(self, message: str) -> None:
        super().__init__(readable(message))


class OutOfMemory(NextscaleError):
    """The device's memory is too small for this call."""


def first_line(error: BaseException) -> str:
    """What another library says, as a part of our sentence."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def choices(values: Iterable[object]) -> str:
    """The allowed values, as they are listed inside an error sentence."""
    return ", ".join(readable(str(v)) for v in values)


def readable(text: str) -> str:
    """Fit for one line of a terminal: nothing that steers it, no endless words."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else _escaped(c) for c in text)
    text = re.sub(rf"\S{{{MAX_WORD + 1},}}", lambda word: shortened(word[0], CUT_WORD), text)
    return shortened(text, MAX_SENTENCE)


def shortened(text: str, most: int) -> str:
    """Without its middle, where it is longer than `most`."""
    if len(text) <= most:
        return text
    tail = most // 2
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()
