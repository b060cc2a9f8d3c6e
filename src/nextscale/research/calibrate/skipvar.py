"""SkipVAR's decision: which shortcuts would have kept an image, learned from its two features. Needs scikit-learn."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

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
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise NextscaleError("calibrating skipvar needs scikit-learn: pip install 'nextscale[calibrate]'") from None
    if not 0 < target < 1:
        raise NextscaleError(f"target must lie in (0, 1), not {target!r}")
    calls = list(batches(pipe, prompts, seed))
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


def _fit(features: list[list[float]], labels: list[int]) -> dict[str, Any]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(features)
    classes = sorted(set(labels))
    if len(classes) == 1:
        coef, intercept = [[0.0, 0.0]], [0.0]
    else:
        fitted = LogisticRegression(max_iter=1000).fit(scaler.transform(features), labels)
        coef, intercept = fitted.coef_.tolist(), fitted.intercept_.tolist()
        if len(classes) == 2:  # scikit-learn then keeps the score of the second class alone
            coef, intercept = [[0.0, 0.0], *coef], [0.0, *intercept]
    numbers = {"mean": scaler.mean_.tolist(), "scale": scaler.scale_.tolist(), "coef": coef, "intercept": intercept}
    return {"classes": classes, **numbers}
