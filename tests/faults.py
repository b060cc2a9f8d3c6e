"""Would the tests notice? `python tests/faults.py [words]` puts each fault of faults.json into a copy of the tree, one
at a time, and runs the tests named beside it. Words choose the faults whose place or change contains one of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("faults.json")
TRITON = ROOT / ".venv" / "triton"
NOTICED, TIMED_OUT = "noticed", "noticed (it hangs)"
LIMIT = 600  # seconds


def faults() -> list[dict]:
    """Each with `path` below src/nextscale, `old` and `new` text, and `tests` for pytest, of which perhaps `only` some.

    Those of `interpreted` tests need Triton, as `make test-kernels` installs it.
    """
    return json.loads(TABLE.read_text())


def problem(fault: dict) -> str | None:
    """Why a fault of the table cannot be put in, if it cannot."""
    path = ROOT / "src/nextscale" / fault["path"]
    times = path.read_text().count(fault["old"]) if path.is_file() else 0
    if times != 1:
        return f"{fault['path']} holds the old text {times} times"
    if fault.get("interpreted") and not TRITON.is_dir():
        return "it needs Triton: run `make test-kernels` once"
    missing = [test for test in fault["tests"] if not (ROOT / test.split("::")[0]).is_file()]
    return f"no file {missing[0]}" if missing else None


def attempt(tree: Path, fault: dict) -> str:
    """Put it in, run, take it out."""
    path = tree / "src/nextscale" / fault["path"]
    right = path.read_text()
    path.write_text(right.replace(fault["old"], fault["new"]))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault["tests"]]
    command += ["-k", fault["only"]] if "only" in fault else []
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    if fault.get("interpreted"):
        environment |= {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{TRITON}", "TRITON_INTERPRET": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        path.write_text(right)
    if done.returncode == 1:
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
        return f"{NOTICED} by {failed[0].split(' ', 1)[1].split(' - ')[0]}" if failed else NOTICED
    if done.returncode < 0:
        return f"{NOTICED} (it ends the interpreter)"
    return "NOT NOTICED" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main(words: list[str]) -> int:
    chosen = [f for f in faults() if not words or any(w in json.dumps(f, ensure_ascii=False) for w in words)]
    left = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", ".*_cache"))
        for fault in chosen:
            what = f"{fault['path']}: {fault['old'].strip()[:60]!r} -> {fault['new'].strip()[:60]!r}"
            answer = problem(fault) or attempt(tree, fault)
            left += not answer.startswith(NOTICED)
            print(f"{what}\n    {answer}", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} faults are noticed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
