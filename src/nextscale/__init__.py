"""Fast inference for next-scale (visual autoregressive) image generators."""

from nextscale.checkpoints.official import from_official
from nextscale.errors import NextscaleError
from nextscale.images import to_pil
from nextscale.loop import ScaleEnd
from nextscale.models.registry import MODELS
from nextscale.pipeline import Output, Pipeline
from nextscale.verify import verify

__version__ = "0.1.0"
__all__ = [
    "MODELS",
    "NextscaleError",
    "Output",
    "Pipeline",
    "ScaleEnd",
    "__version__",
    "from_official",
    "to_pil",
    "verify",
]
