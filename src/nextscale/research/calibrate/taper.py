"""What Taper goes by to give every image what it needs: the entropies of complete runs, and what budgets come to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.engine.callback import ScaleEnd
from nextscale.engine.entropy import token_entropy
from nextscale.io.progress import bar
from nextscale.methods.base import SCHEMA
from nextscale.methods.taper import Taper, uncertainty
from nextscale.methods.typical_entropies import KIND
from nextscale.pipeline import Pipeline
from nextscale.research.calibrate import batches
from nextscale.research.evaluate.ssim import ssim

QUANTILES = 64
BUDGETS = (0.04, 0.06, 0.09, 0.13, 0.18, 0.25, 0.33, 0.42, 0.55, 0.7)


def calibrate_taper(pipe: Pipeline, prompts: Sequence[Any], seed: int = 0, **options: Any) -> dict[str, Any]:
    """Measure; `options` are those of a call (guidance, size, ...)."""
    calls = list(batches(pipe, prompts, seed))
    with bar("calibrate taper", len(calls) * (1 + len(BUDGETS)), pipe.progress_bar) as advance:
        cells: dict[int, list[Tensor]] = {}
        plain = []
        for call in calls:
            plain.append(_watched(pipe, call, options, cells))
            advance(1)
        levels = torch.linspace(0, 1, QUANTILES + 1, dtype=torch.float64)
        last = max(cells) + 1
        scales = [
            {"at": (t + 1) / last, "quantiles": torch.cat(found).double().quantile(levels).tolist()}
            for t, found in sorted(cells.items())
        ]
        found: dict[str, Any] = {"schema": SCHEMA, "name": KIND, "measured_on": pipe.spec.name, "prompts": len(prompts)}
        found |= {"scales": scales, "spendings": []}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "entropies.json"
            path.write_text(json.dumps(found))
            for budget in BUDGETS:
                method = Taper(budget=budget, entropies=str(path))
                found["spendings"].append({"asked": budget, **_spending(pipe, calls, method, plain, options, advance)})
    return found


def _watched(pipe: Pipeline, call: dict[str, Any], options: Any, cells: dict[int, list[Tensor]]) -> Tensor:
    """Plain images; `cells` gets how uncertain those of every scale were before it ran."""
    schedule = pipe.schedule(**{k: v for k, v in options.items() if k in ("aspect_ratio", "pixel_budget")})

    def note(end: ScaleEnd) -> None:
        t = end.scale.index
        if t + 1 < len(schedule):
            entropy = token_entropy(end.raw_logits[: len(end.images)])
            score = uncertainty(entropy, schedule.grids[t], schedule.grids[t + 1])
            cells.setdefault(t + 1, []).append(score.flatten().cpu())

    return pipe(**call, **options, callback_on_scale_end=note, output_type="pt").images.cpu()


def _spending(
    pipe: Pipeline, calls: Sequence[dict[str, Any]], method: Taper, plain: list[Tensor], options: Any, advance: Any
) -> dict[str, float]:
    shares: list[float] = []
    likeness: list[Tensor] = []
    for call, images in zip(calls, plain, strict=True):
        out = pipe(**call, **options, method=method, output_type="pt")
        shares += [entry["flops"] / entry["flops_full"] for entry in out.trace.to_dict()["images"]]
        likeness.append(ssim(out.images.cpu(), images, span=1.0))
        advance(1)
    return {"spent": sum(shares) / len(shares), "ssim": torch.cat(likeness).mean().item()}
