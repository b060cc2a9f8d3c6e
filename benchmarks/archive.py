"""What `benchmarks/results.py` has so far, in one file that goes from machine to machine."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from nextscale.io.locking import LOCK
from nextscale.io.writing import UNFINISHED, atomic_write

# Features of images are large, and only distances of sets need them; the rest is made of the cells in a moment.
LEFT_OUT = (".npy", "/results.json", "/table.csv", LOCK, UNFINISHED)
RESULTS = "results"  # where the folders of all weights lie in the archive, wherever they lie here


def pack(path: Path, folder: Path, root: Path, others: Iterable[Path]) -> None:
    """Write the folder of some weights, and other files below `root`; the archive replaces `path` once it is whole."""
    found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.as_posix().endswith(LEFT_OUT))
    names = {p: Path(RESULTS, p.relative_to(folder.parent)) for p in found}
    names |= {p: p.relative_to(root) for p in sorted(others) if p.is_file()}
    with atomic_write(path) as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
        for place, name in names.items():
            with contextlib.suppress(FileNotFoundError):  # others are at work there
                content = place.read_bytes()
                entry = tarfile.TarInfo(name.as_posix())
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def unpack(path: Path, folder: Path, weights: str, root: Path) -> None:
    """Put everything where it was; `folder` has a folder for each weights, and the archive must be of these."""
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name)
            content = archive.extractfile(member) if member.isfile() else None
            if content is None or name.is_absolute() or ".." in name.parts:
                raise SystemExit(f"{path} is no archive of results: it holds {member.name!r}")
            if name.parts[0] == RESULTS and name.parts[1] != weights:
                raise SystemExit(f"{path} is of other weights: {name.parts[1]}, not {weights}")
            with atomic_write(folder / Path(*name.parts[1:]) if name.parts[0] == RESULTS else root / name) as file:
                file.write(content.read())
