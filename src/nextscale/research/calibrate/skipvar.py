"""SkipVAR's decision: which shortcuts would have kept an image, learned from its two features."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.cluster.workers import LocalWorkers, Workers
from nextscale.engine.callback import ScaleEnd
from nextscale.errors import NextscaleError
from nextscale.io.progress import bar
from nextscale.methods.base import SCHEMA
from nextscale.methods.drop_guidance import DropGuidance
from nextscale.methods.skipvar import SkipVAR, SkipVARPolicy, Stage
from nextscale.pipeline import Pipeline
from nextscale.research.calibrate import Calls, batches
from nextscale.research.evaluate.ssim import ssim

MAX_SKIPPED = 3  # scales that may be left out, or run without guidance


def calibrate_skipvar(
    pipe: Pipeline,
    prompts: Sequence[Any],
    target: float = 0.88,
    seed: int = 0,
    at: float = 10 / 13,
    workers: Workers | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit a decision file: shortcuts whose image has an SSIM of at least `target` to the complete one."""
    if not 0 < target < 1:
        raise NextscaleError(f"target must lie in (0, 1), not {target!r}")
    calls = list(batches(pipe, prompts, seed, workers))
    features: list[list[float]] = []
    skips: list[int] = []
    unguided: list[int] = []
    with bar("calibrate skipvar", len(calls), pipe.progress_bar) as advance:
        find = functools.partial(_outcomes, target=target, at=at)
        for seen, skip, free in (workers or LocalWorkers(pipe)).run(Calls(find, options), calls, advance):
            features += seen
            skips += skip
            unguided += free
    complete = [i for i, k in enumerate(skips) if k == 0]
    stages = {"skip": _fit(features, skips)}
    if complete:  # the second stage is asked only where nothing can be left out
        stages["uncond"] = _fit([features[i] for i in complete], [unguided[i] for i in complete])
    share = {f"left out {k}": skips.count(k) / len(skips) for k in range(MAX_SKIPPED + 1)}
    about = {"calibrated_on": pipe.spec.name, "prompts": len(prompts), "target_ssim": target, "at": at, "seen": share}
    return {"schema": SCHEMA, "name": "skipvar-decision", **about, **stages}


def _outcomes(
    pipe: Pipeline, call: dict[str, Any], options: Any, target: float, at: float
) -> tuple[list[list[float]], list[int], list[int]]:
    """Features of every image of a call, and how many last scales it could do without, or without guidance."""
    images: list[Tensor] = []

    def keep(end: ScaleEnd) -> None:
        images.append(end.decode())

    watcher = _Watcher(at=at)
    out = pipe(**call, **options, method=watcher, callback_on_scale_end=keep, output_type="latent")
    policy = out.trace.policy
    assert isinstance(policy, SkipVARPolicy)
    scales, complete = len(images), images[-1]
    first = policy.decides + 1  # what was run before the decision cannot be saved any more
    most = min(MAX_SKIPPED, scales - first)
    skip = _largest([ssim(images[scales - 1 - k], complete) for k in range(1, most + 1)], target, len(complete))
    free = [0] * len(complete)
    if policy.context.sampling.guided_until:
        shortcuts = []
        for k in range(1, most + 1):
            again = pipe(**call, **options, method=DropGuidance(scales - k + 1), output_type="latent")
            shortcuts.append(ssim(pipe.decode(again.images), complete))
        free = _largest(shortcuts, target, len(complete))
    return [policy.features[i] for i in range(len(complete))], skip, free


def _largest(scores: list[Tensor], target: float, images: int) -> list[int]:
    """Find, per image, the most that can be saved: the last k whose score, and all before it, reach the target."""
    best = [0] * images
    for k, score in enumerate(scores, start=1):
        for image, value in enumerate(score.tolist()):
            if best[image] == k - 1 and value >= target:
                best[image] = k
    return best


class _Watcher(SkipVAR):
    """SkipVAR that looks and changes nothing."""

    def start(self, context: Any) -> SkipVARPolicy:
        nothing = Stage((0,), (0.0, 0.0), (1.0, 1.0), ((0.0, 0.0),), (0.0,))
        return SkipVARPolicy(context, self, nothing, None)


def _fit(features: Sequence[Sequence[float]], labels: Sequence[int]) -> dict[str, Any]:
    """Logistic regression on standardized features, weights penalized by half their squares, as is usual."""
    x, classes = torch.tensor(features, dtype=torch.float64), sorted(set(labels))
    mean, scale = x.mean(0), x.std(0, unbiased=False)
    x = (x - mean) / torch.where(scale > 0, scale, 1)
    y = torch.tensor([classes.index(label) for label in labels])
    with torch.inference_mode(False), torch.enable_grad():
        coef = torch.zeros(len(classes), x.shape[1], dtype=x.dtype, requires_grad=True)
        intercept = torch.zeros(len(classes), dtype=x.dtype, requires_grad=True)
        found = [coef, intercept]
        optimizer = torch.optim.LBFGS(found, max_iter=1000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(F.linear(x, coef, intercept), y, reduction="sum") + coef.square().sum() / 2
            value.backward()
            return value

        optimizer.step(loss)
    numbers = {"mean": mean, "scale": torch.where(scale > 0, scale, 1), "coef": coef, "intercept": intercept}
    return {"classes": classes, **{name: values.tolist() for name, values in numbers.items()}}
