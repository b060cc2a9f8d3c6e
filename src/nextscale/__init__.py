"""Fast inference for next-scale (visual autoregressive) image generators."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nextscale.version import __version__

if TYPE_CHECKING:
    from nextscale.call import Output
    from nextscale.checkpoints.official import from_official
    from nextscale.errors import NextscaleError
    from nextscale.images import to_pil
    from nextscale.loop import ScaleEnd
    from nextscale.methods import (
        NOVA,
        Compose,
        DropGuidance,
        FastVAR,
        Method,
        RandomSelection,
        SkipVAR,
        SparseVAR,
        ToProVAR,
        Truncate,
    )
    from nextscale.models.registry import MODELS
    from nextscale.pipeline import Pipeline
    from nextscale.verify import verify

__all__ = [
    "MODELS",
    "NOVA",
    "Compose",
    "DropGuidance",
    "FastVAR",
    "Method",
    "NextscaleError",
    "Output",
    "Pipeline",
    "RandomSelection",
    "ScaleEnd",
    "SkipVAR",
    "SparseVAR",
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
    "Output": "call",
    "Pipeline": "pipeline",
    "ScaleEnd": "loop",
    "from_official": "checkpoints.official",
    "to_pil": "images",
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


class _Package(ModuleType):
    @property
    def verify(self) -> Any:
        return importlib.import_module("nextscale.verify").verify

    @verify.setter
    def verify(self, module: ModuleType) -> None:
        """Drop the subpackage of that name, which its import puts here: `nextscale.verify` is the function."""


sys.modules[__name__].__class__ = _Package
