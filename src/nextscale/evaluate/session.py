"""An evaluation in a folder: its settings, its cells, its tables. It may be stopped and go on at any time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from nextscale.errors import NextscaleError
from nextscale.evaluate.bench import Bench
from nextscale.evaluate.recogniser import read_about
from nextscale.evaluate.report import Report, Row, as_csv
from nextscale.export.manifest import first_difference, model_settings, run_facts
from nextscale.export.weights import weights_sha256
from nextscale.methods import Method
from nextscale.writing import whole_file

SETTINGS, RESULTS, TABLE = "settings.json", "results.json", "table.csv"
FORMAT = 1
UNRELIABLE = 0.97  # a task whose verdicts are right less often is marked


def settings_of(bench: Bench) -> dict[str, Any]:
    """What must be the same when an evaluation goes on. Methods may be added."""
    pipe = bench.pipe
    schedule = pipe.schedule(**bench.size)
    size = tuple(n * pipe.tokenizer.stride for n in schedule.last)
    made = model_settings(pipe, weights_sha256(pipe), None, pipe.sampling(len(schedule)), (size[0], size[1]))
    del made["method"]
    asked = json.dumps([(i.ask.to_dict(), i.seed) for i in bench.items])
    return {
        "format": FORMAT,
        **made,
        "pictures": len(bench.items),
        "prompts_sha256": hashlib.sha256(asked.encode()).hexdigest(),
        "batch": bench.batch,
        "device": pipe.device.type,
        "features": bench.perceive,
    }


def open_folder(bench: Bench) -> None:
    """Refuse a folder of other settings or of somebody else; else note the settings."""
    folder = bench.folder
    if folder is None:
        return
    now = settings_of(bench)
    path = folder / SETTINGS
    if path.exists():
        try:
            there = json.loads(path.read_text())
        except ValueError:
            raise NextscaleError(f"{path} is damaged; choose another --out") from None
        if difference := first_difference(there, now):
            raise NextscaleError(f"{folder} is an evaluation with other settings: {difference}; choose another --out")
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise NextscaleError(f"{folder} is not empty and holds no evaluation; choose another --out")
    with whole_file(path) as file:
        file.write((json.dumps(now, indent=1) + "\n").encode())


def save(bench: Bench, methods: dict[str, Method | None], report: Report, rows: Sequence[Row]) -> None:
    folder = bench.folder
    if folder is None:
        return
    pictures = {
        name: [
            {"task": i.ask.task, "prompt": i.ask.prompt, "seed": i.seed, **record}
            for i, record in zip(bench.items, cell.records, strict=True)
        ]
        for name, cell in report.cells.items()
    }
    content = {
        "settings": settings_of(bench),
        "run": run_facts(bench.pipe, bench.batch),
        "grader": read_about().get("accuracy"),
        "methods": {name: None if m is None else m.to_dict() for name, m in methods.items()},
        "rows": [row.flat() for row in rows],
        "pictures": pictures,
    }
    with whole_file(folder / RESULTS) as file:
        file.write((json.dumps(content) + "\n").encode())
    with whole_file(folder / TABLE) as file:
        file.write(as_csv(rows).encode())


def unreliable_tasks() -> list[str]:
    """Tasks in which the recogniser's own verdicts are not right often enough."""
    accuracy = read_about().get("accuracy", {})
    return [task for task, found in accuracy.items() if found["accuracy"] < UNRELIABLE]
