"""A lock on a folder. The system holds it for the process, so one that is killed leaves none behind."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from nextscale.errors import NextscaleError

try:
    import fcntl
except ImportError:  # Windows: nobody is warned there
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
TRIES = 4  # who only looks, or is leaving, holds a lock for a moment


@contextlib.contextmanager
def locked(folder: Path, suffix: str = "") -> Iterator[None]:
    """Lock the folder, made if need be and removed if it stays empty.

    With a `suffix` the lock is one of several parts that may work side by side; without, it is of the whole folder.
    """
    with contextlib.ExitStack() as stack:
        try:
            missing = [p for p in (folder, *folder.parents) if not p.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(_remove_empty, missing)
            stack.enter_context(_hold(folder, LOCK, shared=bool(suffix)))
            if suffix:
                stack.enter_context(_hold(folder, LOCK + suffix, shared=False))
        except OSError as error:
            raise NextscaleError(f"cannot write into {folder}: {error.strerror}") from None
        yield


def require_unlocked(folder: Path, suffix: str = "") -> None:
    """Complain at once, and make nothing."""
    if any(os.path.exists(folder / name) for name in (LOCK, LOCK + suffix)):
        with locked(folder, suffix):
            pass


@contextlib.contextmanager
def _hold(folder: Path, name: str, shared: bool) -> Iterator[None]:
    path = folder / name
    tries = 0
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if flock(handle, shared):
            if _is_same_file(path, handle):
                break
            os.close(handle)  # its owner has just removed it: what we hold, nobody else will find
            continue
        with os.fdopen(handle) as file:
            owner = file.read(100).strip()
        tries += 1
        if tries == TRIES:
            who = f"another process ({owner})" if owner else "another process"
            raise NextscaleError(f"{who} is at work in {folder}; let it finish, or choose another --out")
        time.sleep(0.05)
    try:
        os.ftruncate(handle, 0)
        if not shared:
            os.write(handle, f"{os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        if not shared or flock(handle):  # the last to leave
            with contextlib.suppress(OSError):
                os.unlink(path)
        os.close(handle)


def flock(handle: int, shared: bool = False, unsupported: bool = True) -> bool:
    """Whether the open file could be locked, without waiting; `unsupported` where the system has no locks."""
    if fcntl is None:
        return unsupported
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return unsupported and error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is_same_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # not empty
        for folder in folders:
            folder.rmdir()
