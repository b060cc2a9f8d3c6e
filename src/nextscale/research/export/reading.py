"""The prompt files of the benchmarks: small checks that all of them share. A `ValueError` says what is wrong."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

from nextscale.errors import NextscaleError, choices
from nextscale.io.reading import parse_json, read_text

MAX_ID_BYTES = 200  # bytes of an id; a file's name may have 255, with what is added to it


def load(file: Path) -> Any:
    return parse_json(content(file))


def content(file: Path) -> str:
    try:
        return read_text(file)
    except NextscaleError:
        raise
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None


def load_line(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        column = re.sub(r"^line 1, (column \d+) is not JSON: .*", r"it is not JSON at \1", str(error))
        raise ValueError(f"{where} is {text.strip()[:40]!r}: {column}") from None


def field(record: Any, key: str, where: str) -> str:
    """Read a text that is not empty."""
    value = prompt(record, key, where)
    if not value.strip():
        raise ValueError(f"{where} has no {key!r} of text")
    return value


def prompt(record: Any, key: str, where: str) -> str:
    """Read a text; whether it can be drawn is checked later, for all at once."""
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{where} has no {key!r} of text")
    return value


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is not a prompt but {value!r:.40}")
    return value


def one_line(file: Path) -> str:
    line = content(file).strip()
    if "\n" in line:
        raise ValueError(f"{file.name} holds several lines, not one prompt")
    return line


def file_name(name: Any, where: str) -> str:
    """Check an id that becomes the name of a file: it must not lead elsewhere, nor hold a dot, where scorers cut."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name) or len(name.encode()) > MAX_ID_BYTES:
        raise ValueError(f"{where} has the id {name!r:.60}, which cannot name an image")
    return name


def sources(path: Path, pattern: str) -> list[Path]:
    """List the file itself, or those of a folder, in the order of their names."""
    if path.is_dir() and not pattern:
        raise ValueError("it is a folder")
    try:
        found = sorted(path.glob(pattern)) if path.is_dir() else [path]
        for file in found:
            if file.exists() and not file.is_file():  # a pipe would wait for ever
                raise ValueError(f"{file.name} is no regular file")
            file.open("rb").close()
    except OSError as error:
        raise NextscaleError(f"the prompts {path} cannot be read: {error.strerror}") from None
    if not found:
        raise ValueError(f"the folder holds no {pattern}")
    return found


def digest(files: list[Path]) -> str:
    """Hash as `sha256sum FILE` does one file, and `sha256sum * | sha256sum` several."""
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    if len(sums) == 1:
        return next(iter(sums.values()))
    return hashlib.sha256("".join(f"{value}  {name}\n" for name, value in sums.items()).encode()).hexdigest()


def require_unique(names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"these ids stand there twice: {choices(sorted(twice)[:3])}")
