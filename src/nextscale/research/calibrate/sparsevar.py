"""SparseVAR's block: the one whose change tells best which cells can be left out, at an equal share of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nextscale.cluster.workers import LocalWorkers, Workers
from nextscale.errors import NextscaleError
from nextscale.io.progress import bar
from nextscale.methods.base import SCHEMA
from nextscale.methods.sparsevar import SparseVAR
from nextscale.pipeline import Pipeline
from nextscale.research.calibrate import Calls, batches
from nextscale.research.evaluate.ssim import ssim

BLOCKS = 8  # that are compared, evenly spread over the depth
BISECTIONS = 7  # halvings of the interval in which tau is sought


def calibrate_sparsevar(
    pipe: Pipeline,
    prompts: Sequence[Any],
    target: float = 0.5,
    seed: int = 0,
    workers: Workers | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit a preset; `target` is the share of tokens to exclude from sparse scales. `options` are those of a call."""
    if not 0 < target < 1:
        raise NextscaleError(f"target must lie in (0, 1), not {target!r}")
    calls = list(batches(pipe, prompts, seed, workers))
    depth, blocks = pipe.backbone.depth, min(BLOCKS, pipe.backbone.depth)
    found = []
    with bar("calibrate sparsevar", len(calls) * (1 + blocks * (BISECTIONS + 1)), pipe.progress_bar) as advance:

        def run(method: SparseVAR | None, images: bool = True) -> tuple[list[Tensor], float]:
            """Images of all calls, if they are wanted, and the share of excluded tokens."""
            find = functools.partial(_sparse_tokens, images=images)
            found = (workers or LocalWorkers(pipe)).run(Calls(find, {"method": method, **options}), calls, advance)
            kept, tokens = 0.0, 0
            for _, counts in found:
                for of_scale, tokens_of_scale in counts:
                    kept += of_scale
                    tokens += tokens_of_scale
            return [shown for shown, _ in found if shown is not None], 1 - kept / tokens if tokens else 0.0

        plain, _ = run(None)
        for number in range(1, blocks + 1):
            method = SparseVAR(block=round(number * depth / blocks) / depth)
            tau, images, share = _tau_of(target, method, run)
            alike = torch.cat([ssim(a, b, span=1.0) for a, b in zip(images, plain, strict=True)]).mean().item()
            found.append({"block": method.block, "tau": tau, "excluded": share, "ssim": alike})
    best = max(found, key=lambda entry: entry["ssim"])
    return {
        "schema": SCHEMA,
        "name": SparseVAR.name,
        "calibrated_on": pipe.spec.name,
        "prompts": len(prompts),
        "target": target,
        "reached": best["excluded"],
        "blocks": found,
        "fields": dataclasses.asdict(SparseVAR(block=best["block"], tau=best["tau"])),
    }


def _tau_of(
    target: float, method: SparseVAR, run: Callable[..., tuple[list[Tensor], float]]
) -> tuple[float, list[Tensor], float]:
    """The threshold at which a block excludes that share, and what it makes of the images."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        _, share = run(dataclasses.replace(method, tau=middle), False)
        low, high = (low, middle) if share > target else (middle, high)
    images, share = run(dataclasses.replace(method, tau=low))
    return low, images, share


def _sparse_tokens(
    pipe: Pipeline, call: dict[str, Any], options: dict[str, Any], images: bool
) -> tuple[Tensor | None, list[tuple[float, int]]]:
    """The images of a call, and of every sparse scale the tokens that were kept, in the mean over layers, and all."""
    out, counts = pipe(**call, **options, output_type="pt" if images else "latent"), []
    for image in out.trace.to_dict()["images"]:
        first = image["activation"]["scale"] or len(image["scales"]) + 1
        for e in image["scales"][first - 1 :]:
            counts.append((sum(layer["kept"] for layer in e["layers"]) / pipe.backbone.depth, e["tokens"]))
    return out.images.cpu() if images else None, counts
