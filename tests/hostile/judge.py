"""Run cases and judge them. Every process runs many: to import torch takes longer than most of them."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import logging
import multiprocessing
import os
import platform
import random
import re
import resource
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS = 40  # a case that takes longer hangs
MEMORY = 12 * 2**30
LONGEST = 1000  # characters of an error sentence
WATCHED = (
    "open",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "shutil.rmtree",
)
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pty.spawn",
    "webbrowser.open",
)

Case = tuple[str, str, int]


class Watch:
    """What Python does while a case runs: no process, no connection, nothing written outside of some folders."""

    def __init__(self, allowed: tuple[Path, ...]) -> None:
        self.allowed, self.seen, self.on = allowed, [], False  # type: ignore[var-annotated]
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in FORBIDDEN:
            self.seen.append(f"{event} {args[:2]!r:.100}")
        elif event in WATCHED and isinstance(args[0], (str, bytes)):
            written = event != "open" or (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            path = Path(os.fsdecode(args[0]).split("\0")[0])
            if written and not self.inside(path):
                self.seen.append(f"{event} {path}")

    def inside(self, path: Path) -> bool:
        real = Path(os.path.realpath(path.parent)) / path.name
        return any(real.is_relative_to(folder) for folder in self.allowed) or str(path) == os.devnull

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[str]]:
        self.seen, self.on = [], True
        try:
            yield self.seen
        finally:
            self.on = False


def files_here() -> dict[str, bytes]:
    """Below the working folder: the whole of their paths may be too long for the system."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def command(argv: list[str]) -> tuple[int, str, str]:
    """Exit code, and what was printed; as if a shell had started it."""
    from nextscale.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict") for _ in range(2))
    sys.argv = ["nextscale", *argv]
    logging.getLogger().handlers.clear()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except Exception:
            code = 70
            traceback.print_exc()
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


def faults(code: int, out: str, err: str, before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """What is wrong about the way a command ended."""
    found = []
    if code not in (0, 2):
        found.append(f"exit code {code}")
    if "Traceback (most recent call last)" in out + err:
        found.append("a traceback")
    strange = re.search(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]", out + err)
    if strange:
        found.append(f"the control character {strange[0]!r} in what is printed")
    if code == 2 and "Usage:" not in err:
        said = [line for line in err.splitlines() if not line.startswith(("WARNING: ", "INFO: "))]
        if len(said) != 1 or not said[0].startswith("error: ") or len(said[0]) > LONGEST:
            found.append(f"not one sentence: {said!r:.300}")
    changed = [name for name, content in before.items() if after.get(name) != content]
    if changed:
        found.append(f"changed {changed[0]}")
    new = {name: content for name, content in after.items() if name not in before}
    if code and new:
        found.append(f"left {next(iter(new))} behind")
    for name, content in new.items():
        if Path(name).name.startswith("."):
            found.append(f"left {name} behind")
        if (
            not content
            or (name.endswith(".json") and not _is_json(content))
            or (name.endswith(".png") and not _is_png(content))
        ):
            found.append(f"{name} is not whole")
    return found


def _is_json(content: bytes) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    with contextlib.suppress(ValueError):
        json.loads(content, parse_constant=refuse)
        return True
    return False


def _is_png(content: bytes) -> bool:
    from PIL import Image

    with contextlib.suppress(Exception):
        Image.open(io.BytesIO(content)).load()
        return True
    return False


def judge(case: Case, seed: int, root: Path, watch: Watch) -> tuple[list[str], list[str], int, str]:
    """Faults, the command, its exit code and what it said."""
    from hostile.kinds import KINDS
    from hostile.sandbox import Sandbox

    attacked, name, n = case
    with tempfile.TemporaryDirectory(dir=root, prefix="case-") as folder:
        work = Path(folder) / "work"
        work.mkdir()
        box = Sandbox(random.Random(f"{seed}/{attacked}/{name}/{n}"), work, root / "models", Path(folder) / "executed")
        argv = KINDS[attacked][name](box)
        os.chdir(work)
        before = files_here()
        with watch.watching() as seen:
            code, out, err = command(argv)
        found = faults(code, out, err, before, files_here()) + seen
        os.chdir(root)
        if box.marker.exists():
            found.append("code of a file was executed")
    return found, argv, code, err.strip() or out.strip()


def worker(cases: list[Case], seed: int, root: Path, connection: Connection) -> None:
    for name in ("TMPDIR", "HF_HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME"):
        os.environ[name] = str(root / "scratch")
    os.environ["HF_HUB_OFFLINE"] = "1"  # a hub is asked for in other tests
    tempfile.tempdir = None
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import torch

    torch.set_num_threads(1)
    from matplotlib import font_manager  # noqa: F401  (lists the fonts once)

    platform.platform()  # asks the system once

    watch = Watch((root, Path("/proc")))  # nothing can be written to the latter
    for case in cases:
        connection.send(("begin", case))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        verdict = judge(case, seed, root, watch)
        faulthandler.cancel_dump_traceback_later()
        connection.send(("end", case, *verdict))
    connection.send(("done",))


def run_all(cases: list[Case], seed: int, root: Path, processes: int, verbose: bool = False) -> int:
    """Print what failed and a last line for each input; the exit code says whether all passed."""
    from hostile.sandbox import write_models

    started = time.perf_counter()
    write_models(root / "models")
    (root / "scratch").mkdir()
    context = multiprocessing.get_context("spawn")
    failed: list[Case] = []
    codes: Counter[str] = Counter()

    def start(some: list[Case]) -> tuple[Connection, Any, list[Case]]:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(some, seed, root, theirs))
        process.start()
        theirs.close()
        return ours, process, list(some)

    running = {c: (p, left) for c, p, left in (start(cases[i::processes]) for i in range(processes)) if left}
    while running:
        for connection in wait(list(running)):
            process, left = running[connection]  # type: ignore[index]
            try:
                message = connection.recv()  # type: ignore[union-attr]
            except EOFError:  # it died, or hung and was ended
                process.join()
                del running[connection]  # type: ignore[arg-type]
                if left:
                    failed.append(left[0])
                    print(f"FAILED {' / '.join(map(str, left[0]))}: hangs, or ended the process ({process.exitcode})")
                    if left[1:]:
                        ours, again, rest = start(left[1:])
                        running[ours] = (again, rest)
                continue
            if message[0] == "done":
                process.join()
                del running[connection]  # type: ignore[arg-type]
            if message[0] != "end":
                continue
            _, case, found, argv, code, said = message
            left.remove(case)
            codes[f"exit {code}"] += 1
            if found:
                failed.append(case)
            if found or verbose:
                print(f"{'FAILED' if found else 'passed'} {' / '.join(map(str, case))}: {'; '.join(found)}")
                print(f"    nextscale {shlex.join(argv)!r:.300}\n    exit {code}: {said!r:.500}")
    for attacked in dict.fromkeys(case[0] for case in cases):
        mine = [case for case in cases if case[0] == attacked]
        bad = sum(case[0] == attacked for case in failed)
        print(f"{attacked}: {len({c[1] for c in mine})} kinds, {len(mine)} cases, {bad} failed")
    kinds = len({case[:2] for case in cases})
    ended = ", ".join(f"{code}: {n}" for code, n in sorted(codes.items()))
    print(f"{kinds} kinds, seed {seed}, {time.perf_counter() - started:.0f} s, {ended}")
    print(f"{len(cases) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0
