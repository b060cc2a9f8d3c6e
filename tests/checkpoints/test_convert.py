"""Converting when the disk is full, and after a process that was killed at it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import files
from support.files import VAR_CASE

from nextscale.checkpoints import convert as convert_module
from nextscale.checkpoints import locate, pretrained
from nextscale.checkpoints.convert import convert
from nextscale.checkpoints.scratch import SCRATCH_PREFIX
from nextscale.errors import NextscaleError


@pytest.fixture
def plan(tmp_path: Path) -> pretrained.Blueprint:
    return pretrained.read(locate.locate(files.training(tmp_path, VAR_CASE), None, None, locate.Hub()))


class FullDisk:
    """A file on a disk that takes so many bytes and no more."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data) -> int:
        self.room -= len(memoryview(data).cast("B"))
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)


@pytest.mark.parametrize("room", [0, 5000, 200_000])
def test_a_full_disk(plan, tmp_path: Path, monkeypatch, room: int) -> None:
    write = convert_module._write
    monkeypatch.setattr(convert_module, "_write", lambda file, *rest: write(FullDisk(file, room), *rest))
    with pytest.raises(NextscaleError, match=r"cannot write .*/c: No space left on device$"):
        convert(plan, tmp_path / "out" / "c", torch.float32)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_full_disk_when_a_file_is_closed(plan, tmp_path: Path, monkeypatch, name: str) -> None:
    """Small writes stay in a buffer until then."""
    plain = Path.open

    def opened(path: Path, mode: str = "r", *rest, **options):
        return plain(Path("/dev/full") if path.name == name and "w" in mode else path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(NextscaleError, match="No space left on device"):
        convert(plan, tmp_path / "out" / "c", torch.float32)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_on_the_command_line(tmp_path: Path) -> None:
    """No file of this process may be larger than a limit, which the system says of a full disk's kind."""
    code = """
import resource, signal, sys
from nextscale.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.argv = ["nextscale", "convert", *sys.argv[1:]]
main()
"""
    source = files.training(tmp_path, VAR_CASE)
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out" / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == f"error: cannot write {tmp_path / 'out' / 'c'}: File too large"
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("name", "why"), [("x" * 300, "File name too long"), ("m.pth/inside", "File exists")])
def test_folders_that_cannot_be(plan, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "m.pth").touch()
    with pytest.raises(NextscaleError, match=f"{why}$"):
        convert(plan, tmp_path / name, torch.float32)


STUCK = """
import sys, time, torch
from pathlib import Path
from nextscale.checkpoints import locate, pretrained
from nextscale.checkpoints.convert import convert
plan = pretrained.read(locate.locate(Path(sys.argv[1]), None, None, locate.Hub()))
def wait(step):
    print("writing", flush=True)
    time.sleep(600)
convert(plan, Path(sys.argv[2]), torch.float32, wait)
"""


def test_what_a_killed_conversion_leaves_is_removed_by_the_next(plan, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    mine = folder / f"{SCRATCH_PREFIX}mine"  # named alike, but with something else inside
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    (folder / ".nextscale-convert-elsewhere").mkdir()  # another machine's
    kept = {mine.name, ".nextscale-convert-elsewhere"}
    command = [sys.executable, "-c", STUCK, str(tmp_path / "ar-ckpt-last.pth"), str(folder / "a")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        (scratch,) = {p.name for p in folder.iterdir()} - kept
        convert(plan, folder / "b", torch.float32)
        assert {p.name for p in folder.iterdir()} == kept | {scratch, "b"}, "its owner is alive"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (folder / scratch).exists()
        convert(plan, folder / "c", torch.float32)
        assert {p.name for p in folder.iterdir()} == kept | {"b", "c"}
    finally:
        process.kill()
        process.wait()
    assert (mine / "thesis.txt").exists()
