"""Fast inference for next-scale (visual autoregressive) image generators."""

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
from nextscale.version import __version__

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
