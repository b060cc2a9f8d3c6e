"""Fast inference for next-scale (visual autoregressive) image generators."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nextscale.version import __version__

if TYPE_CHECKING:
    from nextscale.engine.callback import ScaleEnd
    from nextscale.engine.output import Output
    from nextscale.errors import NextscaleError
    from nextscale.io.images import to_pil
    from nextscale.methods import (
        NOVA,
        Compose,
        DropGuidance,
        FastVAR,
        LDPruning,
        Method,
        RandomSelection,
        SkipVAR,
        SparseVAR,
        Taper,
        ToProVAR,
        Truncate,
    )
    from nextscale.models.registry import MODELS
    from nextscale.official import from_official
    from nextscale.pipeline import Pipeline
    from nextscale.research.verify import verify

__all__ = [
    "MODELS",
    "NOVA",
    "Compose",
    "DropGuidance",
    "FastVAR",
    "LDPruning",
    "Method",
    "NextscaleError",
    "Output",
    "Pipeline",
    "RandomSelection",
    "ScaleEnd",
    "SkipVAR",
    "SparseVAR",
    "Taper",
    "ToProVAR",
    "Truncate",
    "__version__",
    "from_official",
    "to_pil",
    "verify",
]

# Where a name lives that is looked up when it is first asked for: importing torch takes seconds, and neither
# `nextscale --help` nor the shell's completion needs it.
_HOMES = {
    "MODELS": "models.registry",
    "NextscaleError": "errors",
    "Output": "engine.output",
    "Pipeline": "pipeline",
    "ScaleEnd": "engine.callback",
    "from_official": "official",
    "to_pil": "io.images",
    "verify": "research.verify",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(importlib.import_module(f"nextscale.{_HOMES.get(name, 'methods')}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"nextscale.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"nextscale.{name}":
                raise
    raise AttributeError(f"module 'nextscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
