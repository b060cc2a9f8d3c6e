"""How much a method drops, scale by scale: a table that NOVA can follow instead of its own scale linkage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nextscale.io.progress import bar
from nextscale.methods.base import SCHEMA, Method
from nextscale.pipeline import Pipeline
from nextscale.research.calibrate import batches


def measure_shares(
    pipe: Pipeline, prompts: Sequence[Any], method: Method, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """Measure the mean share of tokens that `method` prunes at every relative scale."""
    dropped: dict[int, list[float]] = {}
    calls = list(batches(pipe, prompts, seed))
    with bar(f"shares of {method.name}", len(calls), pipe.progress_bar) as advance:
        for call in calls:
            for image in pipe(**call, **options, method=method, output_type="latent").trace.to_dict()["images"]:
                for e in image["scales"]:
                    kept = [layer["kept"] / e["tokens"] for layer in e["layers"]]
                    dropped.setdefault(e["scale"], []).append(1 - sum(kept) / len(kept) if kept else 1.0)
            advance(1)
    last = len(dropped)
    shares = [(t / last, sum(values) / len(values)) for t, values in sorted(dropped.items())]
    first = next((i for i, (_, share) in enumerate(shares) if share > 0), last - 1)
    about = {"method": method.to_dict(), "measured_on": pipe.spec.name, "prompts": len(prompts)}
    return {"schema": SCHEMA, "name": "scale-table", **about, "entries": [list(entry) for entry in shares[first:]]}
