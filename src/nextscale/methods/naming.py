"""Methods as a user writes them in one word: `nova:paper`, `truncate:2`, `nova:t_est=8;tau=1.5+drop_guidance:12`."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from nextscale.errors import NextscaleError, choices
from nextscale.methods import METHODS, Compose, Method
from nextscale.methods.base import read_stored
from nextscale.methods.stored import stored, stored_names

PLAIN = "none"


def parse_method(text: str) -> Method | None:
    """A method, or None for the plain run.

    Parts of a composition are joined by '+'. Behind a part's colon stands a number (its first field), a preset's
    name or file, or field=value; further values follow behind ';'.
    """
    if text.strip() == PLAIN:
        return None
    parts = [_part(part.strip()) for part in text.split("+")]
    return parts[0] if len(parts) == 1 else Compose(tuple(parts))


def parse_methods(text: str) -> dict[str, Method | None]:
    """A list separated by commas; every method under the name that it was given."""
    entries = [entry.strip() for entry in text.split(",")]
    for i, entry in enumerate(entries):
        if entry in entries[:i]:
            raise NextscaleError(f"the method {entry!r} stands twice in {text!r}")
    return {entry: parse_method(entry) for entry in entries}


def _part(text: str) -> Method:
    name, colon, rest = text.partition(":")
    cls = _class(name.strip())
    pieces = [piece.strip() for piece in rest.split(";")]
    if not colon:
        return cls()
    if not all(pieces):
        raise NextscaleError(f"{text!r} is not complete; behind ':' and ';' stands a number, a preset or field=value")
    stored = _preset(cls, pieces[0])
    method = stored or cls()
    fields = {k: v for piece in pieces[stored is not None :] for k, v in read_field(method, piece).items()}
    return dataclasses.replace(method, **fields)  # all at once: fields may only be right together


def _class(name: str) -> type[Method]:
    bare = {known.replace("_", ""): cls for known, cls in METHODS.items()}  # "dropguidance" will do
    cls = bare.get(name.replace("_", "").replace("-", ""))
    if name == PLAIN:
        raise NextscaleError(f"{PLAIN!r} is the plain run, which stands alone; methods: {choices(METHODS)}")
    if cls is None:
        raise NextscaleError(f"unknown method {name!r}; allowed: {PLAIN}, {choices(METHODS)}")
    return cls


def _preset(cls: type[Method], piece: str) -> Method | None:
    """The stored settings that `piece` names; None if it is a number or a field."""
    path = stored(cls.name, piece)
    if _reads_as_number(piece) or ("=" in piece and not path.is_file()):
        return None
    first = dataclasses.fields(cls)[0].name
    if not isinstance(getattr(cls(), first), str) or (path.is_file() and read_stored(path)["name"] == cls.name):
        return cls.preset(piece)
    # What is stored for such a method is rather the file that its first field asks for, as SkipVAR's decision.
    if not path.is_file() and not stored(first, piece).is_file():
        have = stored_names(cls.name) + stored_names(first)
        raise NextscaleError(f"{cls.name} has no preset {piece!r}; allowed: {choices(have) or 'none'}, or a file")
    return cls.from_fields({first: piece})


def read_field(method: Method, piece: str) -> dict[str, Any]:
    known = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    name, equals, written = (part.strip() for part in piece.partition("="))
    if not equals:
        name, written = next(iter(known)), piece
        if not _reads_as_number(piece):
            raise NextscaleError(f"{method.name}: {piece!r} is not of the form field=value; fields: {choices(known)}")
        if isinstance(known[name], bool) or not isinstance(known[name], (int, float)):
            raise NextscaleError(f"{method.name}: a number sets its first field, and {name} is none; write field=value")
    if name not in known:
        raise NextscaleError(f"{method.name} has no field {name!r}; allowed: {choices(known)}")
    value = parse_method(written) if isinstance(known[name], Method) else _value(written)
    if isinstance(known[name], Method) and value is None:
        raise NextscaleError(f"{method.name}: {name} must be a method; allowed: {choices(METHODS)}")
    if isinstance(known[name], bool) and not isinstance(value, bool):
        raise NextscaleError(f"{method.name}: {name} must be true or false, not {written!r}")
    if isinstance(known[name], int) and isinstance(value, float):
        raise NextscaleError(f"{method.name}: {name} must be a whole number, not {written!r}")
    return {name: value}


def _reads_as_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))  # "infinity" is a preset
    except ValueError:
        return False


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False}.get(text, text)  # a bare word is text
