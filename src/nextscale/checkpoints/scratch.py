"""A folder that appears complete or not at all; what killed processes left of theirs is removed at the next run."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: nothing is locked there, so nothing is removed either
    fcntl = None

# Locks of network disks may hold on one machine only, so each looks after its own folders.
PREFIX = f".nextscale-convert-{zlib.crc32(platform.node().encode()):08x}-"


@contextlib.contextmanager
def whole_folder(out: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """A new folder beside `out` for files of these names, which takes the place of `out` in the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out.parent, names)
    scratch, lock = _locked_folder(out.parent)
    try:
        yield scratch
        os.chmod(scratch, 0o755)
        scratch.rename(out)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int | None]:
    """Its lock is held until this process ends, in whatever way."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            lock = _lock(scratch)
        except (BlockingIOError, FileNotFoundError):  # another process took it for an abandoned one just now
            continue
        except OSError:  # a disk without locks
            return scratch, None
        if scratch.exists():
            return scratch, lock
        os.close(lock)


def _lock(folder: Path) -> int:
    if fcntl is None:
        raise OSError("no locks on this system")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _remove_abandoned(parent: Path, names: tuple[str, ...]) -> None:
    """Folders with nothing but our files in them, whose owner is dead: its lock can be had."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = _lock(folder)
            try:
                if set(os.listdir(folder)) <= set(names):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
