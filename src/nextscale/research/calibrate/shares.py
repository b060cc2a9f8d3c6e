"""How much a method drops, scale by scale: a table that NOVA can follow instead of its own scale linkage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nextscale.cluster.workers import LocalWorkers, Workers
from nextscale.io.progress import bar
from nextscale.methods.base import SCHEMA, Method
from nextscale.pipeline import Pipeline
from nextscale.research.calibrate import Calls, batches


def measure_shares(
    pipe: Pipeline,
    prompts: Sequence[Any],
    method: Method,
    seed: int = 0,
    workers: Workers | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure the mean share of tokens that `method` prunes at every relative scale."""
    dropped: dict[int, list[float]] = {}
    calls = list(batches(pipe, prompts, seed, workers))
    with bar(f"shares of {method.name}", len(calls), pipe.progress_bar) as advance:
        work = Calls(_dropped, {"method": method, **options})
        for found in (workers or LocalWorkers(pipe)).run(work, calls, advance):
            for scale, share in found:
                dropped.setdefault(scale, []).append(share)
    last = len(dropped)
    shares = [(t / last, sum(values) / len(values)) for t, values in sorted(dropped.items())]
    first = next((i for i, (_, share) in enumerate(shares) if share > 0), last - 1)
    about = {"method": method.to_dict(), "measured_on": pipe.spec.name, "prompts": len(prompts)}
    return {"schema": SCHEMA, "name": "scale-table", **about, "entries": [list(entry) for entry in shares[first:]]}


def _dropped(pipe: Pipeline, call: dict[str, Any], options: dict[str, Any]) -> list[tuple[int, float]]:
    """The share that was pruned of every scale of every image."""
    found = []
    for image in pipe(**call, **options, output_type="latent").trace.to_dict()["images"]:
        for e in image["scales"]:
            kept = [layer["kept"] / e["tokens"] for layer in e["layers"]]
            found.append((e["scale"], 1 - sum(kept) / len(kept) if kept else 1.0))
    return found
