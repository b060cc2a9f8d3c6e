"""Paths as users give them."""

from __future__ import annotations

import os
from pathlib import Path

from nextscale.errors import NextscaleError


def as_path(path: str | Path) -> Path:
    """Convert to a path, with `~` expanded to the home folder where there is one."""
    return Path(os.path.expanduser(path))


def present(path: Path) -> bool:
    """Whether a path exists; one that the system refuses to look at is an error of its own."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: a zero byte in the name
        return False
    except OSError as error:
        raise NextscaleError(f"{path} cannot be read: {error.strerror}") from None
    return True
