"""What Taper goes by to give every image what it needs: the entropies of complete runs, and what budgets come to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.cluster.workers import LocalWorkers, Workers
from nextscale.engine.callback import ScaleEnd
from nextscale.engine.entropy import token_entropy
from nextscale.io.progress import bar
from nextscale.methods.base import SCHEMA
from nextscale.methods.taper import Taper, uncertainty
from nextscale.methods.typical_entropies import KIND
from nextscale.pipeline import Pipeline
from nextscale.research.calibrate import Calls, batches
from nextscale.research.evaluate.ssim import ssim

QUANTILES = 64
BUDGETS = (0.04, 0.06, 0.09, 0.13, 0.18, 0.25, 0.33, 0.42, 0.55, 0.7)


def calibrate_taper(
    pipe: Pipeline, prompts: Sequence[Any], seed: int = 0, workers: Workers | None = None, **options: Any
) -> dict[str, Any]:
    """Measure; `options` are those of a call (guidance, size, ...)."""
    calls, hands = list(batches(pipe, prompts, seed, workers)), workers or LocalWorkers(pipe)
    with bar("calibrate taper", len(calls) * (1 + len(BUDGETS)), pipe.progress_bar) as advance:
        plain = hands.run(Calls(_uncertain_cells, options), calls, advance)
        levels = torch.linspace(0, 1, QUANTILES + 1, dtype=torch.float64)
        scales = []
        for t in range(1, len(plain[0][1]) + 1):
            cells = torch.cat([scores[t - 1] for _, scores in plain]).double().sort().values
            places = (levels * (len(cells) - 1)).round().long()
            scales.append({"at": (t + 1) / (len(plain[0][1]) + 1), "quantiles": cells[places].tolist()})
        found: dict[str, Any] = {"schema": SCHEMA, "name": KIND, "measured_on": pipe.spec.name, "prompts": len(prompts)}
        found |= {"scales": scales, "spendings": []}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "entropies.json"
            path.write_text(json.dumps(found))
            for budget in BUDGETS:
                method = Taper(budget=budget, entropies=str(path))
                made = hands.run(Calls(_shares, {"method": method, **options}), calls, advance)
                shares = [share for _, of_call in made for share in of_call]
                pairs = [(images, whole) for (images, _), (whole, _) in zip(made, plain, strict=True)]
                likeness = torch.cat([ssim(a, b, span=1.0) for a, b in pairs]).mean().item()
                spent = sum(shares) / len(shares)
                if not found["spendings"] or spent > found["spendings"][-1]["spent"]:
                    found["spendings"].append({"asked": budget, "spent": spent, "ssim": likeness})
    return found


def _uncertain_cells(pipe: Pipeline, call: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Plain images, and how uncertain the cells of every scale but the first were before it ran."""
    schedule = pipe.schedule(**{k: v for k, v in options.items() if k in ("aspect_ratio", "pixel_budget")})
    cells: list[Tensor] = []

    def note(end: ScaleEnd) -> None:
        t = end.scale.index
        if t + 1 < len(schedule):
            entropy = token_entropy(end.raw_logits[: len(end.images)])
            cells.append(uncertainty(entropy, schedule.grids[t], schedule.grids[t + 1]).flatten().cpu())

    return pipe(**call, **options, callback_on_scale_end=note, output_type="pt").images.cpu(), cells


def _shares(pipe: Pipeline, call: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, list[float]]:
    """The images of a call, and the share of FLOPs of each."""
    out = pipe(**call, **options, output_type="pt")
    return out.images.cpu(), [e["flops"] / e["flops_full"] for e in out.trace.to_dict()["images"]]
