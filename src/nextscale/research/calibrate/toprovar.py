"""ToProVAR's thresholds: from the entropies of complete runs, and the token budget that is wanted."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Sequence
from typing import Any

from nextscale.errors import NextscaleError
from nextscale.io.progress import bar
from nextscale.methods.base import SCHEMA
from nextscale.methods.toprovar import ToProVAR, ToProVARPolicy
from nextscale.pipeline import Pipeline
from nextscale.research.calibrate import batches

logger = logging.getLogger(__name__)
BISECTIONS = 8  # halvings of the interval in which a_max is sought


def calibrate_toprovar(
    pipe: Pipeline, prompts: Sequence[Any], target: float = 0.3, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """Fit a preset; `target` is the share of tokens to compute. `options` are those of a call (guidance, size, ...)."""
    if not 0 < target < 1:
        raise NextscaleError(f"target must lie in (0, 1), not {target!r}")
    calls = list(batches(pipe, prompts, seed))
    with bar("calibrate toprovar", len(calls) * (1 + BISECTIONS), pipe.progress_bar) as advance:
        lows, dominances = _entropies(pipe, calls, options, advance)
        tau = statistics.median(lows)
        dominance_excess = statistics.median(dominances) - 1
        if not dominance_excess > 0:
            raise NextscaleError("the attention maps of this model have no dominant direction: beta cannot be told")
        method = ToProVAR(tau=tau, beta=math.log(2) / dominance_excess)
        low, high, share = 0.0, 1.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            share = _share(pipe, calls, dataclasses.replace(method, a_max=middle), options, advance)
            low, high = (middle, high) if share > target else (low, middle)
    method = dataclasses.replace(method, a_max=high)
    if high == 1.0:
        logger.warning(
            "toprovar on %s computes %.0f %% of the tokens even with a_max = 1, not %.0f %%",
            pipe.spec.name,
            100 * share,
            100 * target,
        )
    return {
        "schema": SCHEMA,
        "name": ToProVAR.name,
        "calibrated_on": pipe.spec.name,
        "prompts": len(prompts),
        "target": target,
        "reached": share,
        "fields": dataclasses.asdict(method),
    }


def _entropies(
    pipe: Pipeline, calls: list[dict[str, Any]], options: Any, advance: Any
) -> tuple[list[float], list[float]]:
    """The share of low-entropy tokens at 60 % of the schedule, and the dominance of every layer's first direction."""
    lows: list[float] = []
    dominances: list[float] = []
    for call in calls:
        out = pipe(**call, **options, method=ToProVAR(tau=1.0), output_type="latent")
        policy = out.trace.policy
        assert isinstance(policy, ToProVARPolicy)
        index = round(0.6 * len(policy.context.schedule))
        for image in range(policy.context.images):
            policy.explain(image)  # reads what is pending
            lows.append(policy.rho[image, index])
            dominances += policy.dominance[image].tolist()
        advance(1)
    return lows, dominances


def _share(pipe: Pipeline, calls: list[dict[str, Any]], method: ToProVAR, options: Any, advance: Any) -> float:
    computed = full = 0
    for call in calls:
        for image in pipe(**call, **options, method=method, output_type="latent").trace.to_dict()["images"]:
            computed += image["tokens_computed"]
            full += image["tokens_full"]
        advance(1)
    return computed / full
