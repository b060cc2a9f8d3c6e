"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nextscale.errors import NextscaleError

MAX_SCRATCH = 40  # letters of a name in that of its scratch file, which must not become too long itself


def require_writable(path: Path) -> None:
    """Complain before anything is computed; folders that are missing are made."""
    for made in (path, *path.parents):
        if not os.path.lexists(made) and not made.name.isprintable():
            raise NextscaleError(f"cannot write {str(path)!r}: a name must not hold control characters or broken text")
    try:
        if os.path.isdir(path):
            raise NextscaleError(f"{path} is a folder, not a file name")
        if os.path.exists(path) and not os.path.isfile(path):
            raise NextscaleError(f"{path} is no regular file, so it cannot be replaced by one")
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.lstat()  # refuses names that are too long
    except OSError as error:
        raise NextscaleError(f"cannot write {path}: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise NextscaleError(f"cannot write {path}: Permission denied")


def require_folder(folder: Path) -> None:
    """The same for a folder whose files will be written."""
    if os.path.isfile(folder):
        raise NextscaleError(f"{folder} is a file, not a folder")
    require_writable(folder / "x")


@contextlib.contextmanager
def whole_file(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """Until it is whole, the file lies beside `path`, or in a `folder` on the same disk."""
    require_writable(path)
    prefix, suffix = f".{path.stem[:MAX_SCRATCH]}.", path.suffix[:MAX_SCRATCH]
    try:
        handle, scratch = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=folder or path.parent)
    except OSError as error:
        raise NextscaleError(f"cannot write {path}: {error.strerror}") from None
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
