"""ToProVAR's thresholds: from the entropies of complete runs, and the token budget that is wanted."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Sequence
from typing import Any

from nextscale.cluster.workers import LocalWorkers, Workers
from nextscale.errors import NextscaleError
from nextscale.io.progress import bar
from nextscale.methods.base import SCHEMA
from nextscale.methods.toprovar import ToProVAR, ToProVARPolicy
from nextscale.pipeline import Pipeline
from nextscale.research.calibrate import Calls, batches

logger = logging.getLogger(__name__)
BISECTIONS = 10  # halvings of the interval in which a_max is sought
MAX_A = 8.0  # its end: eq. 6 clips
QUANTILES = (0.5, 0.75, 0.9, 1.0)  # of the dominances of all layers; with a higher one more layers can be thinned


def calibrate_toprovar(
    pipe: Pipeline,
    prompts: Sequence[Any],
    target: float = 0.3,
    seed: int = 0,
    workers: Workers | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit a preset; `target` is the share of tokens to compute. `options` are those of a call (guidance, size, ...)."""
    if not 0 < target < 1:
        raise NextscaleError(f"target must lie in (0, 1), not {target!r}")
    calls = list(batches(pipe, prompts, seed, workers))
    with bar("calibrate toprovar", len(calls) * (1 + len(QUANTILES) + BISECTIONS), pipe.progress_bar) as advance:
        hands = workers or LocalWorkers(pipe)

        def share_of(method: ToProVAR) -> float:
            counts = hands.run(Calls(_tokens, {"method": method, **options}), calls, advance)
            return sum(computed for computed, _ in counts) / sum(full for _, full in counts)

        lows: list[float] = []
        dominances: list[float] = []
        for low_tokens, dominance in hands.run(
            Calls(_entropies, {"method": ToProVAR(tau=1.0), **options}), calls, advance
        ):
            lows += low_tokens
            dominances += dominance
        for quantile in QUANTILES:
            excess = _quantile(dominances, quantile) - 1
            if not excess > 0:
                raise NextscaleError("the attention maps of this model have no dominant direction: beta cannot be told")
            method = ToProVAR(tau=statistics.median(lows), beta=math.log(2) / excess, a_max=MAX_A)
            share = share_of(method)
            if share <= target:
                break
        low, high = 0.0, MAX_A
        for _ in range(BISECTIONS if share <= target else 0):
            middle = (low + high) / 2
            found = share_of(dataclasses.replace(method, a_max=middle))
            low, high, share = (middle, high, share) if found > target else (low, middle, found)
    method = dataclasses.replace(method, a_max=high)
    if share > target:
        logger.warning(
            "toprovar on %s computes %.0f %% of the tokens at least, not %.0f %%",
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
        "quantile": quantile,  # of dominance, at which a layer counts as half a detail layer
        "fields": dataclasses.asdict(method),
    }


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _entropies(pipe: Pipeline, call: dict[str, Any], options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The share of low-entropy tokens at 60 % of the schedule, and the dominance of every layer's first direction."""
    lows: list[float] = []
    dominances: list[float] = []
    policy = pipe(**call, **options, output_type="latent").trace.policy
    assert isinstance(policy, ToProVARPolicy)
    index = round(0.6 * len(policy.context.schedule))
    for image in range(policy.context.images):
        policy.explain(image)  # reads what is pending
        lows.append(policy.rho[image, index])
        dominances += policy.dominance[image].tolist()
    return lows, dominances


def _tokens(pipe: Pipeline, call: dict[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    """How many were computed, and of how many."""
    images = pipe(**call, **options, output_type="latent").trace.to_dict()["images"]
    return sum(image["tokens_computed"] for image in images), sum(image["tokens_full"] for image in images)
