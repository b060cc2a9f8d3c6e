"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nextscale.errors import NextscaleError


def require_writable(path: Path) -> None:
    """Complain before anything is computed; folders that are missing are made."""
    try:
        if path.is_dir():
            raise NextscaleError(f"{path} is a folder, not a file name")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NextscaleError(f"cannot write {path}: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise NextscaleError(f"cannot write {path}: Permission denied")


@contextlib.contextmanager
def whole_file(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """Until it is whole, the file lies beside `path`, or in a `folder` on the same disk."""
    require_writable(path)
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=folder or path.parent)
    except OSError as error:
        raise NextscaleError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except OSError as error:
        Path(scratch).unlink(missing_ok=True)
        raise NextscaleError(f"cannot write {path}: {error.strerror}") from None
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
