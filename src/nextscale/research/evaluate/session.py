"""An evaluation in a folder: its settings, its cells, its tables. It may be stopped and go on at any time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nextscale.errors import NextscaleError
from nextscale.io.locking import LOCK, locked
from nextscale.io.reading import read_json
from nextscale.io.writing import UNFINISHED, as_json, atomic_write, remove_unfinished, require_folder
from nextscale.methods import Method
from nextscale.research.evaluate.bench import Bench, Cell
from nextscale.research.evaluate.recognizer import read_about
from nextscale.research.evaluate.report import Row, as_csv
from nextscale.research.export.manifest import first_difference, model_settings
from nextscale.research.export.weights import weights_sha256
from nextscale.research.prompt_checks import skipped

SETTINGS, RESULTS, TABLE = "settings.json", "results.json", "table.csv"
FORMAT_VERSION = 1
UNRELIABLE = 0.97  # a task whose verdicts are right less often is marked


def settings_of(bench: Bench) -> dict[str, Any]:
    """What must be the same when an evaluation goes on. Methods may be added."""
    pipe = bench.pipe
    schedule = pipe.schedule(**bench.size)
    size = tuple(n * pipe.tokenizer.stride for n in schedule.last)
    made = model_settings(pipe, weights_sha256(pipe), None, pipe.model.sampling(len(schedule)), (size[0], size[1]))
    del made["method"]
    asked = json.dumps([(i.scene_prompt.to_dict(), i.seed) for i in bench.items])
    return {
        "format": FORMAT_VERSION,
        **made,
        "pictures": len(bench.items),
        "prompts_sha256": hashlib.sha256(asked.encode()).hexdigest(),
        "batch": bench.batch,
        "device": bench.device,
        "features": bench.with_features,
    }


def open_folder(bench: Bench) -> None:
    """Refuse a folder of other settings or of somebody else; else note the settings."""
    folder = bench.folder
    if folder is None:
        return
    now = settings_of(bench)
    path = folder / SETTINGS
    if path.exists():
        there = read_json(path, "the settings of an evaluation")
        if not isinstance(there, dict):
            raise NextscaleError(f"{path} is not the settings of an evaluation; choose another --out")
        if difference := first_difference(there, now):
            raise NextscaleError(f"{folder} is an evaluation with other settings: {difference}; choose another --out")
        return
    require_ours(folder)
    with atomic_write(path) as file:
        file.write(as_json(now))


def require_ours(folder: Path) -> None:
    """A folder that holds something else is not for us."""
    if not folder.is_dir() or (folder / SETTINGS).exists():
        return
    if any(not p.name.startswith(LOCK) and not p.name.endswith(UNFINISHED) for p in folder.iterdir()):
        raise NextscaleError(f"{folder} is not empty and holds no evaluation; choose another --out")


@contextlib.contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """The folder is this process's alone, and what a killed one left unfinished is removed."""
    require_folder(folder)
    require_ours(folder)
    with locked(folder):
        for part in (folder, folder / "cells", folder / "presets"):
            require_folder(part)
            remove_unfinished(part)
        yield


def save(bench: Bench, methods: dict[str, Method | None], cells: dict[str, Cell], rows: Sequence[Row]) -> None:
    folder = bench.folder
    if folder is None:
        return
    graded = {
        name: [
            {**{k: asked[k] for k in ("task", "background", "prompt")}, "seed": item.seed, **record}
            for item, record in zip(bench.items, cell.records, strict=True)
            for asked in [item.scene_prompt.to_dict()]
        ]
        for name, cell in cells.items()
    }
    run = bench.run_facts
    if bench.workers is not None and bench.made_by is None and (folder / RESULTS).exists():
        run = read_json(folder / RESULTS, "an evaluation").get("run", run)  # of those who drew it
    content = {
        "settings": settings_of(bench),
        "run": run,
        "grader": read_about().get("accuracy"),
        "methods": {name: None if m is None else m.to_dict() for name, m in methods.items()},
        "rows": [row.flat() for row in rows],
        "skipped": skipped(bench.skipped),
        "pictures": graded,
    }
    with atomic_write(folder / RESULTS) as file:
        file.write(as_json(content, indent=None))
    with atomic_write(folder / TABLE) as file:
        file.write(as_csv(rows).encode())


def unreliable_tasks() -> list[str]:
    """Tasks in which the recognizer's own verdicts are not right often enough."""
    return [
        f"{task} on {background} backgrounds"
        for background, tasks in read_about().get("accuracy", {}).items()
        for task, found in tasks.items()
        if found["accuracy"] < UNRELIABLE
    ]
