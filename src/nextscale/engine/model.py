"""What was loaded: a backbone, its tokenizer, and what its authors published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Schedule, Size
from nextscale.engine.state import cause_of_nan
from nextscale.engine.trace import Costs
from nextscale.errors import NextscaleError
from nextscale.io.arguments import is_single, read_count, read_flag, read_list, short_repr
from nextscale.io.devices import without_autocast
from nextscale.methods.policy import PolicyContext
from nextscale.models.base import Backbone
from nextscale.models.registry import ModelSpec
from nextscale.tokenizers.base import ImageTokenizer

MAX_SIDE = 2**14  # of a feature map: what is more is a mistake


@dataclass(frozen=True)
class Model:
    backbone: Backbone
    tokenizer: ImageTokenizer
    spec: ModelSpec

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def schedule(
        self,
        height: int | None = None,
        width: int | None = None,
        aspect_ratio: float | None = None,
        pixel_budget: str | None = None,
    ) -> Schedule:
        """Find the grids of an image of this size; by default the square that the model was made for."""
        sized = height is not None or width is not None
        budget = self.spec.pixel_budget if pixel_budget is None and not sized else pixel_budget
        return self.backbone.schedule(Size(height, width, aspect_ratio, budget), self.tokenizer.stride)

    def sampling(
        self,
        scales: int,
        guidance_scale: float | Sequence[float] | None = None,
        temperature: float | Sequence[float] | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        greedy: bool = False,
        smooth: bool | None = None,
        guidance_layers: int | Sequence[int] = (0,),
    ) -> Sampling:
        """Read the values given, or else those that the model's authors publish, as one per scale."""
        d, depth = self.spec.defaults, self.backbone.depth
        allowed = f"a whole number or a list of them, between {1 - depth} and 0 (= logits)"
        asked = [guidance_layers] if is_single(guidance_layers) else guidance_layers
        layers = read_list(asked, "guidance_layers", allowed)
        layers = [read_count(layer, f"guidance_layers ({allowed})", 1 - depth, 0) for layer in layers]
        return Sampling.make(
            scales,
            guidance=self.backbone.guidance(d.guidance_scale if guidance_scale is None else guidance_scale, scales),
            progress=self.backbone.progress(scales),
            temperature=d.temperature if temperature is None else temperature,
            top_k=d.top_k if top_k is None else top_k,
            top_p=d.top_p if top_p is None else top_p,
            greedy=read_flag(greedy, "greedy"),
            smooth=(d.smooth and not greedy) if smooth is None else read_flag(smooth, "smooth"),
            guidance_layers=tuple(layers),
        )

    def policy_context(
        self, images: int, schedule: Schedule, sampling: Sampling, warmup: int | None = None
    ) -> PolicyContext:
        """Tell a method what it may know of a call."""
        b = self.backbone
        bits = b.token_shape[0] if b.token_shape else None
        known = images, schedule, sampling, b.depth, b.sublayers, bits, self.device, b.dtype
        return PolicyContext(*known, decode=self.decode, costs=Costs.of(b), warmup=warmup)

    def decode(self, features: Tensor) -> Tensor:
        """Decode feature maps [B, d, H, W] to images [B, 3, H, W] in [-1, 1]."""
        d = self.tokenizer.config.code_dim
        fine = isinstance(features, Tensor) and features.ndim == 4 and features.is_floating_point()
        if not fine or features.shape[1] != d or not features.numel() or max(features.shape[2:]) > MAX_SIDE:
            raise NextscaleError(f"feature maps must be floats [B, {d}, H, W], not {short_repr(features)}")
        with without_autocast(self.device):
            images = self.tokenizer.decode(features.to(self.device, torch.float32))
        self.require_finite(torch.isfinite(images).all())
        return images

    def require_finite(self, finite: Tensor) -> None:
        """Complain if decoded images are not."""
        if not finite:
            cause = cause_of_nan(self.tokenizer, "the feature map")
            raise NextscaleError(f"the decoded image is not finite: {cause}")
