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

from nextscale.io.locking import flock

# Locks of network disks may hold on one machine only, so each looks after its own folders.
SCRATCH_PREFIX = f".nextscale-convert-{zlib.crc32(platform.node().encode()):08x}-"


@contextlib.contextmanager
def atomic_folder(out: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Make a new folder beside `out` for files of these names, and rename it to `out` in the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out.parent, names)
    with contextlib.ExitStack() as locks:
        while True:
            scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=out.parent))
            # Another process may take it for an abandoned one before it is locked: then there is none any more.
            if locks.enter_context(_locked(scratch, unsupported=True)) and scratch.exists():
                break
        try:
            yield scratch
            os.chmod(scratch, 0o755)
            scratch.rename(out)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


@contextlib.contextmanager
def _locked(folder: Path, unsupported: bool) -> Iterator[bool]:
    """Try to lock a folder and hold the lock; return `unsupported` where the system has no locks of folders."""
    try:
        handle = os.open(folder, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        yield unsupported and folder.exists()
        return
    try:
        yield flock(handle, unsupported=unsupported)
    finally:
        os.close(handle)


def _remove_abandoned(parent: Path, names: tuple[str, ...]) -> None:
    """Remove folders with nothing but our files in them, whose owner is dead: its lock can be had."""
    for folder in parent.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(folder, unsupported=False) as dead:
            if dead and set(os.listdir(folder)) <= set(names):
                shutil.rmtree(folder, ignore_errors=True)
