"""Text and JSON of files that users hand in. What is wrong with one becomes a sentence that names it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nextscale.errors import NextscaleError

MAX_BYTES = 2**28  # a list of 30,000 prompts has a twentieth of it; what is larger was named by mistake


def read_json(path: Path, what: str) -> Any:
    """Read JSON; `what` the file should be has its article: "a sweep"."""
    try:
        return parse_json(read_text(path))
    except NextscaleError:
        raise
    except ValueError as error:
        raise NextscaleError(f"{path} is not {what}: {error}") from None


def read_lines(path: Path, strip: str | None = None) -> list[tuple[int, str]]:
    """Read the lines that are not empty, stripped, with their numbers from 1."""
    try:
        lines = enumerate(read_text(path).split("\n"), start=1)
    except NextscaleError:
        raise
    except ValueError as error:
        raise NextscaleError(f"{path} cannot be read: {error}") from None
    return [(number, line.strip(strip)) for number, line in lines if line.strip()]


def read_text(path: Path) -> str:
    """Read UTF-8 with any line ends, with or without a byte order mark. A `ValueError` says what else it is."""
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise NextscaleError(f"{path} cannot be read: it is {'a folder' if path.is_dir() else 'no regular file'}")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"it has {size:,} bytes, and {MAX_BYTES:,} are allowed")
        data = path.read_bytes()
    except OSError as error:
        raise NextscaleError(f"{path} cannot be read: {error.strerror}") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("it is UTF-16; save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text: line {_line(data, error.start)} is not UTF-8") from None
    if "\0" in text:
        raise ValueError(f"it is not text: line {_line(data, data.index(0))} holds a NUL byte")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str) -> Any:
    """Parse strictly, unlike `json`: no key twice, no NaN, no half characters. A `ValueError` says what is wrong."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise ValueError("it is empty") from None
        raise ValueError(f"line {error.lineno}, column {error.colno} is not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if re.search(r"\\u[dD][89a-fA-F]", text):  # half of a pair alone cannot be written again
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half a character (a lone surrogate)") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {next(k for k in keys if keys.count(k) > 1)!r:.60} twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _line(data: bytes, at: int) -> int:
    return data.count(b"\n", 0, at) + 1
