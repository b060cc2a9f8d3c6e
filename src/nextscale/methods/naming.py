"""Methods as a user writes them in one word: `nova:paper`, `truncate:2`, `nova:t_est=8;tau=1.5+drop_guidance:12`.

The one grammar of the command line, of sweeps and of `pipe(..., method="nova:balanced")`:

    methods = method , method , ...
    method  = none | part + part + ...
    part    = name | name : setting ; setting ; ...
    setting = preset (first only) | number (the first field) | field = value
    value   = JSON | bare word | (method)

Separators inside brackets or double quotes belong to the value. A bare name takes the preset `balanced` if it was
measured on the model at hand, otherwise the method's defaults. `auto` and `auto:fast` name the best of all methods.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from nextscale.errors import NextscaleError, choices
from nextscale.io.arguments import short_repr
from nextscale.methods import METHODS, Compose, Method
from nextscale.methods.auto import AUTO, best_method, is_measured
from nextscale.methods.base import read_stored
from nextscale.methods.package_data import stored, stored_names

logger = logging.getLogger(__name__)

PLAIN = "none"
MEASURED = "balanced"  # what a bare name stands for on the model that it was measured on
MAX_LENGTH = 2000
# A '+' joins parts where a name could follow: neither in 1e+3 nor in /data/a+b.json.
_JOINT = re.compile(r"\+(?=\s*([A-Za-z][\w-]*\s*)?([:+]|$))")
_OPEN, _CLOSE = "([{", ")]}"
_BARE = re.compile(r"[A-Za-z_][\w./ :-]*(?<! )")  # a text that needs no quotes


def parse_method(text: str, model: str | None = None) -> Method | None:
    """A method, or None for the plain run; `model` is the name of the one that it is for."""
    if text.strip() == PLAIN:
        return None
    if len(text) > MAX_LENGTH:
        raise NextscaleError(f"{text!r} is too long for a method; allowed: {MAX_LENGTH} characters")
    parts = [_part(part, model) for part in _split(text, _JOINT)]
    return parts[0] if len(parts) == 1 else Compose(tuple(parts))


def parse_methods(text: str, model: str | None = None) -> dict[str, Method | None]:
    """A list separated by commas; every method under the name that it was given."""
    entries = _split(text, re.compile(","))
    for i, entry in enumerate(entries):
        if not entry:
            raise NextscaleError(f"{text!r} has an empty place between its commas; allowed: {_allowed()}")
        if entry in entries[:i]:
            raise NextscaleError(f"the method {entry!r} stands twice in {text!r}")
    return {entry: parse_method(entry, model) for entry in entries}


def format_method(method: Method | None) -> str:
    """The inverse of `parse_method`: the fields that differ from the method's defaults."""
    if method is None:
        return PLAIN
    if isinstance(method, Compose):
        return "+".join(format_method(part) for part in method.parts)
    usual = type(method)()
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    settings = [f"{k}={_written(v)}" for k, v in values.items() if v != getattr(usual, k)]
    return f"{method.name}:{';'.join(settings)}" if settings else method.name


def with_settings(method: Method, settings: Sequence[str]) -> Method:
    """With fields changed as `field=value` says; the last word on a field counts."""
    return dataclasses.replace(method, **{k: v for piece in settings for k, v in read_field(method, piece).items()})


def is_measured_on(method: str, preset: str, model: str | None) -> bool:
    """Whether the package has this preset of a method, and it was measured on a model."""
    path = stored(method, preset)
    return model is not None and path.is_file() and read_stored(path).get("measured_on") == model


def _part(text: str, model: str | None = None) -> Method:
    name, colon, rest = text.partition(":")
    if name.strip() == AUTO:
        best = best_method(model, *([rest] if colon else []))
        known = is_measured(model)
        why = "which was measured to be the best" if known else f"for no method was measured on {model or 'this model'}"
        logger.log(logging.INFO if known else logging.WARNING, "%s is %s, %s", text, best, why)
        return _part(best, model)
    cls = _class(name.strip())
    if not colon and is_measured_on(cls.name, MEASURED, model):
        logger.info("%s is %s:%s, the preset that was measured on %s", cls.name, cls.name, MEASURED, model)
        return cls.preset(MEASURED)
    if not colon:
        return cls()
    pieces = _split(rest, re.compile(";"))
    if not all(pieces):
        raise NextscaleError(f"{text!r} is not complete; behind ':' and ';' stands a number, a preset or field=value")
    preset = _preset(cls, pieces[0])
    method, pieces = (cls(), pieces) if preset is None else (preset, pieces[1:])
    fields: dict[str, Any] = {}
    for piece in pieces:
        for field, value in read_field(method, piece).items():
            if field in fields:
                raise NextscaleError(f"{cls.name}: {field} is set twice in {text!r}")
            fields[field] = value
    return dataclasses.replace(method, **fields)  # all at once: fields may only be right together


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """At separators that stand outside of brackets and quotes."""
    parts, start, buffer, closing, quoted = [], 0, 0, list[str](), False
    while buffer < len(text):
        letter = text[buffer]
        if quoted:
            buffer += letter == "\\"  # whatever follows
            quoted = letter != '"'
        elif letter == '"':
            quoted = True
        elif letter in _OPEN:
            closing.append(_CLOSE[_OPEN.index(letter)])
        elif letter in _CLOSE:
            if not closing or closing.pop() != letter:
                raise NextscaleError(f"{text!r} has a {letter!r} that closes nothing")
        elif not closing and separator.match(text, buffer):
            parts.append(text[start:buffer].strip())
            start = buffer + 1
        buffer += 1
    if quoted or closing:
        missing = '"' if quoted else closing[-1]
        raise NextscaleError(f"{text!r} is not complete: a {missing!r} is missing")
    return [*parts, text[start:].strip()]


def _class(name: str) -> type[Method]:
    bare = {known.replace("_", ""): cls for known, cls in METHODS.items()}  # "dropguidance" will do
    cls = bare.get(name.replace("_", "").replace("-", ""))
    if name == PLAIN:
        raise NextscaleError(f"{PLAIN!r} is the plain run, which stands alone; methods: {choices(METHODS)}")
    if cls is None:
        raise NextscaleError(f"unknown method {name!r}; allowed: {_allowed()}")
    return cls


def _allowed() -> str:
    return f"{PLAIN}, {AUTO}, {choices(METHODS)}"


def _preset(cls: type[Method], piece: str) -> Method | None:
    """The stored settings that `piece` names; None if it is a number or a field."""
    piece = str(_value(piece)) if piece.startswith('"') else piece
    path = stored(cls.name, piece)
    is_file = os.path.isfile(path)
    if _reads_as_number(piece) or ("=" in piece and not is_file):
        return None
    first = dataclasses.fields(cls)[0].name
    if not isinstance(getattr(cls(), first), str) or (is_file and read_stored(path)["name"] == cls.name):
        return cls.preset(piece)
    # What is stored for such a method is rather the file that its first field asks for, as SkipVAR's decision.
    if not is_file and not os.path.isfile(stored(first, piece)):
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
        if isinstance(known[name], bool) or not isinstance(known[name], (int, float, type(None))):
            raise NextscaleError(f"{method.name}: a number sets its first field, and {name} is none; write field=value")
    if name not in known:
        raise NextscaleError(f"{method.name} has no field {name!r}; allowed: {choices(known)}")
    if not written:
        raise NextscaleError(f"{method.name}: {name} has no value in {piece!r}")
    if isinstance(known[name], Method):
        inner = written[1:-1] if written[0] + written[-1] == "()" else written
        value: Any = parse_method(inner)
        if value is None:
            raise NextscaleError(f"{method.name}: {name} must be a method; allowed: {choices(METHODS)}")
        return {name: value}
    value = _value(written)
    if isinstance(known[name], bool) and not isinstance(value, bool):
        raise NextscaleError(f"{method.name}: {name} must be true or false, not {written!r}")
    if isinstance(known[name], int) and isinstance(value, float):
        raise NextscaleError(f"{method.name}: {name} must be a whole number, not {written!r}")
    if isinstance(known[name], str) and not isinstance(value, str):
        value = written  # a text that happens to look like a number
    return {name: value}


def _reads_as_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))  # "infinity" is a preset
    except ValueError:
        return False


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False}.get(text, text)  # a bare word is text


def _written(value: Any) -> str:
    if isinstance(value, Method):
        return f"({format_method(value)})"
    if isinstance(value, str) and _BARE.fullmatch(value) and _value(value) == value:
        return value
    return json.dumps(value)


def read_method(method: Method | str | None, model: str | None = None) -> Method | None:
    """Read a method for a model, also as the command line writes it: "nova:balanced+truncate:1"."""
    if isinstance(method, str):
        return parse_method(method, model)
    if method is not None and not isinstance(method, Method):
        names = choices(METHODS)
        raise NextscaleError(f"method must be a method such as NOVA(), not {short_repr(method)}; by name: {names}")
    return method
