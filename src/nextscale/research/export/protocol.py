"""Sampling values that authors state for a benchmark, where they are not those of their demo."""

from __future__ import annotations

from typing import Any

from nextscale.models.registry import ModelSpec

_VAR: dict[str, Any] = {"guidance_scale": 1.5, "top_k": 900, "top_p": 0.96, "smooth": False}  # VAR's README
_INFINITY: dict[str, Any] = {"guidance_scale": 4.0, "temperature": 1.0}  # Infinity's scripts/eval.sh, for the 2B model

PROTOCOLS: dict[tuple[str, str], dict[str, Any]] = {  # (benchmark, family or model)
    ("imagenet", "var"): _VAR,
    ("geneval", "infinity-2b"): _INFINITY,
    ("imagereward", "infinity-2b"): _INFINITY,
    ("hpsv2", "infinity-2b"): _INFINITY,
}


def sampling_for(benchmark: str, spec: ModelSpec, given: dict[str, Any]) -> dict[str, Any]:
    """Merge the values given with those of the protocol; what neither names is the model's own default."""
    stated = PROTOCOLS.get((benchmark, spec.family)) or PROTOCOLS.get((benchmark, spec.name)) or {}
    return {**stated, **{name: value for name, value in given.items() if value is not None}}
