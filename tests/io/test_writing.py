"""Files that appear whole, folders that are one process's at a time."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import nextscale
from nextscale.errors import NextscaleError
from nextscale.io import writing
from nextscale.io.locking import LOCK, locked, require_unlocked
from nextscale.io.writing import UNFINISHED, as_json, atomic_write, remove_unfinished, require_folder, require_writable

BUSY = r"another process \(\d+ on .*\) is at work in .*; let it finish, or choose another --out"


@contextmanager
def other_process(code: str, *args: object) -> Iterator[subprocess.Popen]:
    """Another process that has run the code and now waits."""
    # The package without its __init__, which would load torch.
    bare = (
        f"import types; sys.modules['nextscale'] = p = types.ModuleType('nextscale'); p.__path__ = {nextscale.__path__}"
    )
    code = f"import sys\nfrom pathlib import Path\n{bare}\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
    environment = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=environment, **pipes) as child:
        assert child.stdout.readline() == b"ready\n"
        yield child
        child.kill()


def test_a_folder_is_one_process_s_until_it_dies(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    hold = "from nextscale.io.locking import locked\nheld = locked(Path(sys.argv[1])); held.__enter__()"
    with other_process(hold, folder) as child:
        for attempt in (lambda: require_unlocked(folder), lambda: locked(folder).__enter__()):
            with pytest.raises(NextscaleError, match=BUSY) as caught:
                attempt()
            assert f"({child.pid} on " in str(caught.value)
        with pytest.raises(NextscaleError, match="at work in"), locked(folder, "-1of2"):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert (folder / LOCK).exists()
    require_unlocked(folder)
    with locked(folder):
        pass
    assert not (folder / LOCK).exists()


def test_parts_may_work_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "out"
    with ExitStack() as stack:
        for part in ("-1of2", "-2of2"):
            stack.enter_context(locked(folder, part))
            with pytest.raises(NextscaleError, match="at work in"), locked(folder, part):
                pass
        for suffix in ("", "-1of2"):
            with pytest.raises(NextscaleError, match="at work in"):
                require_unlocked(folder, suffix)
        require_unlocked(folder, "-1of3")
    assert not (tmp_path / "a").exists(), "nothing was put there, so nothing stays"
    require_unlocked(folder)
    assert not folder.exists()


def test_a_lock_that_was_just_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner unlinks it between our opening and our locking: then others would find another file."""
    real, opened = os.open, []

    def slow_open(path: object, *args: object) -> int:
        handle = real(path, *args)  # type: ignore[arg-type]
        if Path(str(path)).name == LOCK and not opened:
            os.unlink(path)  # type: ignore[arg-type]
        opened.append(path)
        return handle

    monkeypatch.setattr(os, "open", slow_open)
    with locked(tmp_path):
        assert (tmp_path / LOCK).exists()
        with pytest.raises(NextscaleError, match="at work in"), locked(tmp_path):
            pass


def test_what_killed_processes_left_goes_and_what_living_ones_write_stays(tmp_path: Path) -> None:
    path, mine = tmp_path / "x.json", tmp_path / ".x.json.original"
    mine.write_text("not of ours")
    begin = (
        "from nextscale.io.writing import atomic_write\nf = atomic_write(Path(sys.argv[1])); f.__enter__().write(b'1')"
    )
    with other_process(begin, path) as child:
        (unfinished,) = tmp_path.glob(f"*{UNFINISHED}")
        require_writable(path)
        remove_unfinished(tmp_path)
        assert unfinished.exists(), "its owner is alive"
        child.send_signal(signal.SIGKILL)
        child.wait()
    require_writable(tmp_path / "y.json")
    assert unfinished.exists(), "of another file"
    require_writable(path)
    assert list(tmp_path.iterdir()) == [mine]


def test_long_names_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".json")
    with atomic_write(path) as file:
        file.write(b"1")
    assert path.read_bytes() == b"1"


def test_places_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    server.bind("socket")
    server.close()
    for name, words in {
        "": "is a folder, not a file name",
        "pipe": "it is no regular file",
        "socket": "it is no regular file",
        "file/x.json": "(Not a directory|File exists)",
        "x" * 300: "File name too long",
        f"{'x' * 300}/y": "File name too long",
    }.items():
        with pytest.raises(NextscaleError, match=words):
            require_writable(tmp_path / name)
        with pytest.raises(NextscaleError, match=words), atomic_write(tmp_path / name):
            pass
    for name, words in {
        "file": "Not a directory",
        "file/x": "Not a directory",
        "x" * 300: "File name too long",
    }.items():
        with pytest.raises(NextscaleError, match=f"cannot write into .*: {words}"):
            require_folder(tmp_path / name)
    require_folder(tmp_path / "new" / "er")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(writing.os, "access", lambda path, mode: False)  # root may write anywhere
    for check in (require_folder, require_writable):
        with pytest.raises(NextscaleError, match=r"cannot write .*Permission denied"):
            check(tmp_path / "z")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "pipe", "socket"]


def test_json_without_what_json_cannot_say() -> None:
    output = as_json({"a": math.inf, "b": [math.nan, 1.5], "c": (-math.inf, "é")})
    strict = json.loads(output, parse_constant=lambda name: pytest.fail(name))
    assert strict == {"a": None, "b": [None, 1.5], "c": [None, "é"]}


def test_a_file_may_be_read_by_others(tmp_path: Path) -> None:
    """Scratch files are private; what they become is not."""
    before = os.umask(0o077)
    try:
        with atomic_write(tmp_path / "a.txt") as file:
            file.write(b"x")
            (scratch,) = tmp_path.iterdir()
            assert scratch.name != "a.txt"
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o644


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")

    def write() -> None:
        with atomic_write(tmp_path / "a.txt") as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"
