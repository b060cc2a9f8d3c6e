"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nextscale.errors import NextscaleError
from nextscale.io.locking import flock

UNFINISHED = ".part"


def require_writable(path: Path) -> None:
    """Complain before anything is computed; folders that are missing are made.

    What a killed process left of an earlier try to write the same file is removed.
    """
    _require(path)
    for scratch in path.parent.glob(f"{glob.escape(_prefix(path))}????????{UNFINISHED}"):
        _remove_unfinished(scratch)


def require_folder(path: Path) -> None:
    """Complain of a folder that nobody can write into; nothing is made yet."""
    _require_name(path)
    try:
        there = next(p for p in (path, *path.absolute().parents) if p.exists())
    except OSError as error:
        raise NextscaleError(f"cannot write into {path}: {error.strerror}") from None
    if not there.is_dir():
        raise NextscaleError(f"cannot write into {path}: Not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise NextscaleError(f"cannot write into {path}: Permission denied")


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left in a folder of ours."""
    for scratch in folder.glob(f".*.????????{UNFINISHED}"):
        _remove_unfinished(scratch)


def as_json(value: Any, indent: int | None = 1) -> bytes:
    """Encode as JSON, with null for NaN and infinity."""
    return (json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode()


def finite(value: Any) -> Any:
    """Replace what JSON cannot say by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def _require_name(path: Path) -> None:
    for made in (path, *path.parents):
        if not os.path.lexists(made) and not made.name.isprintable():
            raise NextscaleError(f"cannot write {str(path)!r}: a name must not hold control characters or broken text")


def _require(path: Path) -> None:
    _require_name(path)
    try:
        if os.path.isdir(path):
            raise NextscaleError(f"{path} is a folder, not a file name")
        if os.path.exists(path) and not os.path.isfile(path):
            raise NextscaleError(f"cannot write {path}: it is no regular file")  # /dev/null would be replaced
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.lstat()  # refuses names that are too long
    except OSError as error:
        raise NextscaleError(f"cannot write {path}: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise NextscaleError(f"cannot write {path}: Permission denied")


def _prefix(path: Path) -> str:
    return f".{path.name[:40]}."  # what is added must not make a name too long


def _remove_unfinished(path: Path) -> None:
    """Unless its owner is alive, who holds its lock."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if flock(file.fileno(), unsupported=False):
            path.unlink()


@contextlib.contextmanager
def atomic_write(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` once it is whole; until then it lies beside it, or in `folder`."""
    _require(path)
    try:
        handle, scratch = tempfile.mkstemp(prefix=_prefix(path), suffix=UNFINISHED, dir=folder or path.parent)
    except OSError as error:
        raise NextscaleError(f"cannot write {path}: {error.strerror}") from None
    flock(handle)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except OSError as error:
        Path(scratch).unlink(missing_ok=True)
        raise NextscaleError(f"cannot write {path}: {error.strerror or error}") from None
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
