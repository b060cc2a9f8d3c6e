"""Measure again everything in the documents that rests on the embedded model, and write it there.

    make results                                          # all of it, on a GPU if there is one
    python benchmarks/results.py --only seconds           # some steps: `STEPS` names them
    python benchmarks/results.py --only tables --sweeps main --prompts 2    # a small table, an hour on a CPU
    python benchmarks/results.py --only documents         # no measurement: tables from docs/measured/embedded.json
    python benchmarks/results.py --archive results.tar.gz --minutes 9    # on a machine that is lent for ten minutes

Steps run one after the other, each a command of the package that is printed before it runs: calibrations and presets on
the list of prompts that no table reports, then every table on the other two, then figures. What was measured is kept
below results/ in a folder of these weights; a run that was stopped goes on there. The numbers that documents need go
into docs/measured/embedded.json, and from there into the tables between `<!-- results: NAME -->` and `<!-- end -->`.

An archive holds all of that but the documents, in one file of a few MB. It is read at the beginning if it is there, and
written twice a minute and at the end, whatever ends the run; so a machine that is gone costs half a minute. With the
archive, `--only documents` writes the documents on any other machine.

Seconds are those of two CPU threads, and the only step that wants a quiet machine.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import result_tables
from archive import RESULTS, pack, unpack
from nextscale import Pipeline
from nextscale.errors import NextscaleError
from nextscale.io.reading import read_json
from nextscale.io.writing import as_json, atomic_write
from nextscale.methods.package_data import PRESETS
from nextscale.research.evaluate.scenes import read_scene_prompts
from nextscale.research.export.weights import weights_sha256

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MEASURED = DOCS / "measured" / "embedded.json"
CURVES = {"methods": "curve.png", "taper": "taper-curve.png"}  # of sweeps
FIGURES = (*CURVES.values(), "kept.png", "taper-shares.png", "entropy.png", "contact-sheet.jpg")
TABLES = {  # sweep -> prompts of each task and background; None: all
    "main": None,
    "taper": None,
    "methods": None,
    "nova-table4": 20,
    "nova-table5": 20,
    "toprovar-table4": 20,
    "sparsevar-table4": 20,
    "sparsevar-table5": 20,
    "taper-experiments": 20,
}
PARTS = ("main", "taper")  # of the sweep `methods`
EXAMPLE = ("two foxes above a blue heart", "--seed", "7")
DIGITS = 5
GPU_BATCH, GPU_JOBS = 90, 2  # images at a time; commands at a time, for a GPU waits for the host in between
SAVE_EVERY, POLL = 30.0, 0.2  # seconds
remembering, packing = threading.Lock(), threading.Lock()


class Stopped(Exception):
    """The time is over."""


@dataclass
class Results:
    folder: Path  # of these weights
    device: str
    prompts: int | None  # of each task and background at most
    sweeps: tuple[str, ...] = tuple(TABLES)  # of the step "tables"
    so_far: bool = False  # compute nothing
    archive: Path | None = None
    ends_at: float = math.inf  # by the monotonic clock
    jobs: int = 1
    saved_at: float = field(default_factory=time.monotonic)

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")

    def command(self, *words: str, module: str = "nextscale") -> None:
        """Run it to its end, or to that of the time; what it leaves behind is whole at any moment."""
        print(f"\n$ {'nextscale' if module == 'nextscale' else f'python -m {module}'} {shlex.join(words)}", flush=True)
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", module, *words]
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
        try:
            while process.poll() is None and time.monotonic() < self.ends_at:
                if time.monotonic() >= self.saved_at + SAVE_EVERY:
                    self.save()
                time.sleep(POLL)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if time.monotonic() >= self.ends_at:  # whoever ended this run has ended the command, too
            raise Stopped
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)

    def side_by_side(self, chains: Sequence[Callable[[], None]]) -> None:
        """Do some work at the same time; what failed is told when the rest is done."""
        with ThreadPoolExecutor(self.jobs) as pool:
            started = [pool.submit(chain) for chain in chains]
        for one in started:
            one.result()

    def save(self) -> None:
        with packing:
            self.saved_at = time.monotonic()
            if self.archive is not None:
                others = [MEASURED, *(DOCS / name for name in FIGURES), *PRESETS.glob("*.json")]
                pack(self.archive, self.folder, ROOT, others)

    def calibrate(self, *words: str, out: Path, used_by: str | None = None) -> None:
        """Fit a file of the package, once for these weights; `used_by`: the method that names it."""
        made = self.folder / out.name
        if not made.exists():
            asked = self.folder / "tuning.txt"
            with atomic_write(asked) as file:
                file.write(("\n".join(s.prompt for s in read_scene_prompts("tuning")) + "\n").encode())
            self.command("calibrate", *words, "--prompts", str(asked), "--device", self.device, "--out", str(made))
            for cell in [] if used_by is None else self.folder.glob(f"*/cells/*-{used_by}-*"):
                cell.unlink()  # it was drawn with another file of that name
        shutil.copyfile(made, out)

    def sweep(self, name: str, lists: str, prompts: int | None) -> tuple[Path, str]:
        """Run a sweep; its folder, and the command that a reader would use."""
        fewest = min((n for n in (prompts, self.prompts) if n is not None), default=None)
        words = ["eval", "sweep", name, *(["--lists", lists] if lists != "white,full" else []), "--cost", "flops"]
        words += [] if fewest is None else ["--prompts", str(fewest)]
        words += ["--batch", str(GPU_BATCH)] if self.gpu else []
        shared = "methods" if name in PARTS else name  # which has all of their settings, too
        out = self.folder / "-".join([shared, *([] if fewest is None else [str(fewest)])])
        self.command(*words, "--device", self.device, "--out", str(out), "--so-far" if self.so_far else "--quiet")
        return out, "nextscale " + shlex.join([*words, *["--so-far"] * self.so_far])


def calibrations(run: Results) -> None:
    def sparsevar() -> None:
        run.calibrate("sparsevar", out=PRESETS / "sparsevar-clipart.json")
        run.calibrate(
            "shares", "--method", "sparsevar:clipart;tau=0.6", out=PRESETS / "table-sparsevar.json", used_by="nova"
        )

    def others() -> None:
        run.calibrate("taper", out=PRESETS / "entropies-clipart.json", used_by="taper")
        for target, name in (("0.95", "clipart"), ("0.98", "clipart-98")):
            run.calibrate("skipvar", "--target", target, out=PRESETS / f"decision-{name}.json", used_by="skipvar")
        run.calibrate("toprovar", out=PRESETS / "toprovar-clipart.json")

    run.side_by_side([sparsevar, others])
    found = {}
    for method in ("toprovar", "sparsevar"):
        content = read_json(run.folder / f"{method}-clipart.json", "a calibration")
        found[method] = {
            k: v for k, v in content.items() if k in ("prompts", "target", "reached", "quantile", "blocks")
        }
        found[method]["fields"] = content["fields"]
    remember("calibrations", found)


def presets(run: Results) -> None:
    out, command = run.sweep("presets", "tuning", None)
    for path in sorted((out / "presets").glob("*.json")):
        shutil.copyfile(path, PRESETS / path.name)
    chosen = {p.stem: read_json(p, "a preset") for p in sorted((out / "presets").glob("*.json"))}
    remember("presets", {"command": command, "chosen": chosen})


def tables(run: Results) -> None:
    chains: dict[str, list[str]] = {}  # those of one folder follow each other
    for name in run.sweeps:
        chains.setdefault("methods" if name in PARTS else name, []).append(name)

    def follow(names: Sequence[str]) -> None:
        for name in names:
            table(run, name)

    run.side_by_side([functools.partial(follow, names) for names in chains.values()])


def table(run: Results, name: str) -> None:
    out, command = run.sweep(name, "white,full", TABLES[name])
    content = read_json(out / "results.json", "a sweep")
    rows = [{k: _short(v) for k, v in row.items()} for row in content["rows"]]
    facts = {k: content["run"][k] for k in ("hardware", "torch")}
    about = {"command": command, "images": content["settings"]["pictures"], **facts}
    if name in CURVES:
        shutil.copyfile(out / "curve.png", DOCS / CURVES[name])
    if name == "taper":
        about["spread"] = {n: spread(found) for n, found in content["pictures"].items() if n != "none"}
    remember(f"sweep {name}", {**about, "rows": rows})
    remember("grader", content["grader"])


def spread(records: list[dict[str, Any]]) -> dict[str, float]:
    """How a setting treats different images; the lists of both backgrounds count alike."""
    lists = [[r for r in records if r["background"] == b] for b in dict.fromkeys(r["background"] for r in records)]

    def mean(key: str) -> float:
        return statistics.mean(statistics.mean(r[key] for r in each) for each in lists)

    psnr = sorted(r["psnr"] for r in records)
    found = {"flops": mean("flops"), "most": max(r["flops"] for r in records), "psnr": mean("psnr")}
    worst = statistics.mean(psnr[: max(len(psnr) // 10, 1)])
    return {k: _short(v) for k, v in {**found, "worst": worst, "dissimilarity": 1 - mean("ssim")}.items()}


def figures(run: Results) -> None:
    def example() -> None:
        out = run.folder / "analysis"
        if not all((out / name).exists() for name in ("kept.png", "shares.png")):
            run.command("analyze", *EXAMPLE, "--figures", "kept,shares", "--device", run.device, "--out", str(out))
        shutil.copyfile(out / "kept.png", DOCS / "kept.png")
        shutil.copyfile(out / "shares.png", DOCS / "taper-shares.png")

    def sheet() -> None:
        made = run.folder / "contact-sheet.jpg"
        if not made.exists():
            run.command("--out", str(made), module="training.contact_sheet")
        shutil.copyfile(made, DOCS / made.name)

    run.side_by_side([lambda: entropies(run), example, sheet])


def entropies(run: Results) -> None:
    out = run.folder / "entropy"
    if not (out / "entropy.json").exists():
        run.command("--run", str(out), module="training.entropy")
    shutil.copyfile(out / "entropy.png", DOCS / "entropy.png")
    found = read_json(out / "entropy.json", "the entropies")
    scales = [{k: _short(v) for k, v in scale.items()} for scale in found["scales"]]
    keys = ("t_est", "alpha", "prompts", "eta_positive", "stars")
    remember("entropy", {**{k: found[k] for k in keys}, "scales": scales})


def seconds(run: Results) -> None:
    out = run.folder / "seconds.json"
    if not out.exists():
        run.command("--json", str(out), module="benchmarks.embedded")
    remember("seconds", read_json(out, "seconds"))


def documents(run: Results | None = None) -> None:
    for path, text in result_tables.written(read_json(MEASURED, "what was measured"), ROOT).items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


STEPS: dict[str, Callable[[Results], None]] = {
    "calibrations": calibrations,
    "presets": presets,
    "tables": tables,
    "figures": figures,
    "seconds": seconds,
    "documents": documents,
}


def remember(name: str, found: Any) -> None:
    """Keep a result; those of other weights go."""
    with remembering:
        content = read_json(MEASURED, "what was measured") if MEASURED.exists() else {}
        if name == "weights" and content.get("weights") != found:
            content = {}
        with atomic_write(MEASURED) as file:
            file.write(as_json({**content, name: found}))


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(STEPS), help=f"steps, separated by commas; all: {', '.join(STEPS)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sweeps", default=",".join(TABLES), help="of the step tables, separated by commas")
    parser.add_argument(
        "--prompts", type=int, help="of each task and background at most: a small measurement for a CPU"
    )
    parser.add_argument("--so-far", action="store_true", help="sweeps: only what was measured of all settings already")
    parser.add_argument("--folder", type=Path, default=ROOT / RESULTS)
    parser.add_argument("--archive", type=Path, help="a .tar.gz file of what was measured, to go on from and to write")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many; the same command goes on")
    parser.add_argument("--jobs", type=int, help=f"commands at a time; default: {GPU_JOBS} on a GPU, else 1")
    options = parser.parse_args()
    begun = time.monotonic()
    asked, sweeps = options.only.split(","), options.sweeps.split(",")
    for name, known in (*((step, STEPS) for step in asked), *((sweep, TABLES) for sweep in sweeps)):
        if name not in known:
            parser.error(f"unknown {name!r}; allowed: {', '.join(known)}")
    if asked == ["documents"] and options.archive is None:
        documents()
        return
    weights = weights_sha256(Pipeline.from_pretrained(progress_bar=False))
    if options.archive is not None and options.archive.exists():
        unpack(options.archive, options.folder, weights[0][:12], ROOT)
    remember("weights", weights)
    jobs = options.jobs or (GPU_JOBS if options.device.startswith("cuda") else 1)
    ends_at = begun + 60 * options.minutes
    run = Results(
        options.folder / weights[0][:12],
        options.device,
        options.prompts,
        tuple(sweeps),
        options.so_far,
        options.archive,
        ends_at,
        jobs,
    )
    run.folder.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(run, "ends_at", -math.inf))
    work(run, asked)


def work(run: Results, steps: Sequence[str]) -> None:
    """One step after the other; a machine that is lent does not wait for what failed."""
    begun, failed = time.monotonic(), []
    try:
        for name in steps:
            try:
                STEPS[name](run)
            except (subprocess.CalledProcessError, NextscaleError, OSError) as error:
                failed.append(name)
                print(error, file=sys.stderr)
            print(f"step {name} ends after {time.monotonic() - begun:.0f} s", flush=True)
    except Stopped:
        documents()
        raise SystemExit(f"stopped after {time.monotonic() - begun:.0f} s; the same command goes on") from None
    finally:
        run.save()
    if failed:
        raise SystemExit(f"these steps failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
