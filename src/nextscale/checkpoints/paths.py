"""Paths as users give them."""

from __future__ import annotations

import os
from pathlib import Path

from nextscale.errors import NextscaleError


def as_path(given: str | Path) -> Path:
    """With the home folder put in for `~`, where there is one."""
    return Path(os.path.expanduser(given))


def present(path: Path) -> bool:
    """Whether there is something; a path that the system refuses to look at is an error of its own."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: a zero byte in the name
        return False
    except OSError as error:
        raise NextscaleError(f"{path} cannot be read: {error.strerror}") from None
    return True
