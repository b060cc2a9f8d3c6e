"""Processes of Ray, found by their titles."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def titled(text: str) -> list[int]:
    """The ids of processes whose title holds a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended just now
            continue
        if text in title:
            found.append(int(path.parent.name))
    return found


def descendants(pid: int) -> set[int]:
    """A process and all that it started, and they."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(after[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
