"""How commands end when something is in the way: one line, an exit code, nothing half-written."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from PIL import Image
from support.commands import Recorder, Text, run

import nextscale
from nextscale.cli.ending import _OneLine, exit_code
from nextscale.errors import NextscaleError, choices, readable
from nextscale.io.progress import bar
from nextscale.io.writing import atomic_write, require_writable
from nextscale.testing import tiny_var
from nextscale.version import __version__


def test_a_fault_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("nextscale.models.registry.MODELS", 5)
    done = run("models")
    assert done.returncode == 70
    assert done.stdout == ""
    (kept,) = tmp_path.iterdir()
    assert done.stderr == (
        "error: something went wrong inside nextscale (AttributeError: 'int' object has no attribute 'values'); "
        f"the details are in {kept}; please report it\n"
    )
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    text = kept.read_text()
    assert all(word in text for word in (__version__, "python 3.", "torch 2", "['models']", "Traceback", "in models"))
    monkeypatch.setattr(tempfile, "tempdir", str(kept))  # is no folder
    done = run("models")
    assert done.returncode == 70
    assert done.stderr.count("\n") == 1
    assert "could not be written (Not a directory)" in done.stderr


def test_the_machine_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, sentence in (
        (MemoryError("all of it"), "error: out of memory: all of it\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "error: out of memory: DefaultCPUAllocator"),
        (OSError(errno.ENOSPC, "x", "/a/b"), "error: No space left on device: /a/b\n"),
    ):

        def fail(error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("nextscale.kernels.sdpa.backends", fail)
        done = run("env")
        assert done.returncode == 1
        assert done.stderr.startswith(sentence)
        assert done.stderr.count("\n") == 1


def test_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Image.Image, file, **options) -> None:
        file.write(b"half")
        assert len(list(tmp_path.iterdir())) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("nextscale.io.images.image_paths", lambda out, count: [Path(out)])  # which saves images, too
    monkeypatch.setattr(Image.Image, "save", interrupted)
    monkeypatch.setattr("nextscale.pipeline.Pipeline", Recorder(images=1))
    done = run("generate", "a fox", "--out", tmp_path / "a.png")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
    assert not list(tmp_path.iterdir())


def test_nobody_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "nextscale", "--help"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")

    def broken(*args: object, **options: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("rich.console.Console.print", broken)
    done = run("models")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("reason", "code"), [(errno.EPIPE, 141), (errno.ENOSPC, 1)])
def test_what_is_flushed_last(reason: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.RawIOBase):
        works = False

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            if not self.works:
                raise OSError(reason, "broken")
            return len(bytes(data))  # type: ignore[call-overload]

    raw, err = Broken(), Text()
    out = io.TextIOWrapper(io.BufferedWriter(raw))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert exit_code(lambda **options: out.write("x") and None) == code
    assert err.read_back() == ("" if code == 141 else "error: cannot write the output: broken\n")
    raw.works = True
    out.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "nextscale", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_terminal_that_knows_only_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.pipeline.Pipeline.from_pretrained", lambda *args, **options: tiny_var())
    given = ("--out", tmp_path / "a.png", "--methods", "none,truncate:1")
    done = run("compare", "4", *given, encoding="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    plain = done.stdout.splitlines()[1].split()
    assert plain[0] == "none"
    assert plain[-3:] == ["?", "?", "?"]  # dashes
    assert run("compare", "ß", *given, encoding="ascii").stderr.endswith("not the text '\\xdf'\n")
    monkeypatch.setattr("nextscale.pipeline.Pipeline", Recorder(images=1))
    monkeypatch.setattr(Recorder, "summary", lambda self: "ß – 狐")
    for encoding, shown in (("ascii", "? ? ?"), ("latin-1", "ß ? ?"), ("utf-8", "ß – 狐")):
        done = run("generate", "a fox", "--out", tmp_path / "a.png", encoding=encoding)
        assert (done.returncode, done.stdout.splitlines()[0]) == (0, shown)


@pytest.mark.parametrize(
    "environment", [{"COLUMNS": "1"}, {"COLUMNS": "20"}, {"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=str
)
def test_odd_terminals(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for command in ("models", "methods", "--help"):
        done = run(command, terminal=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert "infinity-8b-512" in run("models", terminal=True).stdout
    err = Text(terminal=True)
    monkeypatch.setattr(sys, "stderr", err)
    with bar("[a name]", 3, None) as advance:
        advance(3)
    if environment == {"NO_COLOR": "1"}:
        assert "[a name]" in err.read_back()


ODD = {
    "too long": "x" * 300 + ".png",
    "too long once it is numbered": "x" * 251 + ".png",
    "a line's end": "a\nb.png",
    "NUL": "a\0b.png",
    "an escape": "\x1b[31m.png",
    "broken bytes": "\udcff.png",
    "below a file": "file/a.png",
    "a folder with a line's end": "a\nb/c.png",
}
OUTPUTS = [
    ("generate", "fox", "--out"),
    ("generate", "fox", "--trace"),
    ("generate", "fox", "--preview"),
    ("compare", "fox", "--out"),
    ("compare", "fox", "--json"),
    ("analyze", "fox", "--out"),
    ("analyze", "fox", "--report"),
    ("verify", "case", "--picture"),
    ("score", "folder", "--metrics", "psnr", "--out"),
    ("tune", "nova", "--max-drop", "ssim=0.1", "--preset"),
    ("calibrate", "toprovar", "--prompts", "p.txt", "--out"),
    ("eval", "scenes", "--out"),
]


@pytest.mark.parametrize("command", OUTPUTS, ids=" ".join)
def test_odd_names(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: object, **options: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr("nextscale.checkpoints.locate.locate", loaded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for kind, name in ODD.items():
        images = ("--images", "1000") if kind == "too long once it is numbered" else ()
        if (images and command[-1] != "--out") or (images and command[0] != "generate"):
            continue
        done = run(*command, name, *images)
        assert done.returncode == 2, (kind, done.stderr)
        assert done.stderr.startswith("error: "), kind
        assert done.stderr.count("\n") == 1, kind
        assert len(done.stderr) < 400
        assert done.stderr.rstrip("\n").isprintable()
        assert not list(tmp_path.glob("**/*.png"))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    done = run(*command, "new.png")
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


def test_names_that_are_in_order(tmp_path: Path) -> None:
    for name in ("x" * 251 + ".png", "ü 日本.png", "a" + "." + "j" * 200, "-.png", "a\u2014b.png"):
        with atomic_write(tmp_path / name) as file:
            file.write(b"x")
        assert (tmp_path / name).read_bytes() == b"x"
    assert stat.S_IMODE((tmp_path / "-.png").stat().st_mode) == 0o644
    assert len(list(tmp_path.iterdir())) == 5
    with pytest.raises(NextscaleError, match="no regular file"):
        require_writable(Path("/dev/null"))


@pytest.mark.parametrize("ending", [".png", ".JPG", ".bmp", ".gif", ".tiff"])
def test_drawn_in_any_format(ending: str, tmp_path: Path) -> None:
    from nextscale.research.analyze import style

    style.save(style.new_figure(1), tmp_path / f"a{ending}")
    with Image.open(tmp_path / f"a{ending}") as image:
        assert image.size == (1200, 120)


def test_a_format_that_has_no_colors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.checkpoints.locate.locate", None)
    for ending in (".xbm", ".grib", ".txt", ""):
        done = run("compare", "fox", "--out", tmp_path / f"a{ending}")
        assert done.returncode == 2
        assert "allowed endings: .png, .jpg, .webp" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("generate", "fox", "--method", "x" * 10_000),
        ("generate", "fox", "--method", "nova:" + "x" * 10_000),
        ("generate", "fox", "--method", "nova:tau=" + "[" * 10_000),
        ("generate", "fox", "--method", "random_selection:like=" * 1000 + "nova"),
        ("generate", "fox", "--method", "random_selection:like=" * 80 + "magic"),
        ("generate", "fox", "--method", "no\nva\x1b[31m"),
        ("generate", "fox", "--model", "x" * 10_000),
        ("generate", "fox", "--device", "x" * 10_000),
        ("generate", "fox", "--seed", "x" * 10_000),
        ("generate", "fox", "--images", "9" * 10_000),
        ("generate", "fox", "--images", "1000000000"),
        ("generate", "fox", "--" + "x" * 10_000),
        ("generate", "qwertz " * 1_000),
        ("generate", "\x1b[2J\u202e"),
        ("generate", "a fox \udcff"),
        ("x" * 10_000,),
        ("generate",),
        ("analyze", "fox", "--figures", "x\r" * 10_000),
        ("export", "x" * 10_000, "--out", "here"),
        ("words", "x" * 10_000),
    ],
    ids=lambda args: " ".join(args)[:40].encode("ascii", "replace").decode(),
)
def test_sentences_are_short_and_harmless(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr) <= 1100
    assert done.stderr.count("\n") == 1
    assert done.stderr.rstrip("\n").isprintable()
    assert not list(tmp_path.iterdir())


def test_readable() -> None:
    assert readable("a path /of/some/length/that/is/still/read.json is whole") == (
        "a path /of/some/length/that/is/still/read.json is whole"
    )
    assert readable("a" * 201) == "a" * 39 + "…" + "a" * 40
    assert readable("one\ttwo\n\x1b[0m\u202e\udcff ü 狐 🦊") == "one\\ttwo\\n\\x1b[0m\\u202e\\udcff ü 狐 🦊"
    assert len(readable("word " * 1000)) == 1000
    assert choices(["x" * 999, "b"]).endswith("x, b")
    assert str(NextscaleError("a\nb")) == "a\\nb"
    record = logging.LogRecord("n", logging.WARNING, "", 0, "seen: %s", ("a\x1b[31m\nb",), None)
    assert _OneLine("%(levelname)s: %(message)s").format(record) == "WARNING: seen: a\\x1b[31m\\nb"


def test_usage() -> None:
    assert run("generate", "4", "--seed", "x").stderr.endswith(" See `nextscale generate --help`.\n")
    assert "No such command 'generat'" in run("generat").stderr
    for args in ((), ("eval",)):
        done = run(*args)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Usage: nextscale" in done.stderr


def test_the_version_and_what_a_start_loads() -> None:
    assert run("--version").stdout == f"nextscale {__version__}\n"
    code = "import sys, nextscale.__main__"
    check = "import atexit, sys; atexit.register(lambda: print(sorted({'torch', 'numpy', 'PIL'} & set(sys.modules))))"
    command = [sys.executable, "-c", f"{check}; sys.argv[1:] = ['--version']; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"nextscale {__version__}", "[]"]


def test_names_of_the_package() -> None:
    importlib.import_module("nextscale.research.verify.base")
    assert nextscale.verify is importlib.import_module("nextscale.research.verify").verify
    assert nextscale.Pipeline is importlib.import_module("nextscale.pipeline").Pipeline
    assert nextscale.methods is sys.modules["nextscale.methods"]
    for name in nextscale.__all__:
        assert getattr(nextscale, name).__class__.__name__ != "module"
    assert dir(nextscale) == sorted(nextscale.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nextscale.nothing
