"""What a runtime is: how planned scales are run, and maps decoded. docs/add-a-runtime.md shows a complete one."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from nextscale.cache.kv import KVCache
from nextscale.engine.rng import NoiseSource
from nextscale.engine.rows import Rows, row_indices
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Scale, Schedule
from nextscale.methods.policy import Numbers, Policy, ScaleContext, ScalePlan
from nextscale.models.base import Backbone
from nextscale.tokenizers.base import ImageTokenizer

if TYPE_CHECKING:
    from nextscale.engine.model import Model
    from nextscale.engine.request import Request
    from nextscale.engine.state import GenerationState


@dataclass(frozen=True)
class CallContext:
    """What stays the same in a call."""

    backbone: Backbone
    tokenizer: ImageTokenizer
    schedule: Schedule
    sampling: Sampling
    policy: Policy
    noise: NoiseSource
    forced_tokens: Sequence[Tensor] = ()  # tokens of the first scales that the user gives, [B, ...]
    watched: bool = True  # somebody looks at the maps between two scales

    @classmethod
    def of(cls, request: Request, model: Model, policy: Policy) -> CallContext:
        watched = request.callback is not None or policy.capabilities.reads_features
        call = model.backbone, model.tokenizer, request.schedule, request.sampling, policy, request.noise
        return cls(*call, request.forced_tokens, watched)

    def forced(self, scale: Scale, rows: Rows) -> Tensor | None:
        """Take the user's tokens of a scale for the images that run it."""
        if scale.index >= len(self.forced_tokens):
            return None
        return self.forced_tokens[scale.index][list(rows.image_ids)]

    @property
    def guide_after(self) -> list[int]:
        """Blocks after which guidance is applied inside the transformer."""
        return [self.backbone.depth + layer for layer in self.sampling.guidance_layers if layer < 0]


@dataclass(frozen=True)
class ScaleBatch:
    """A scale to be run, and by whom."""

    scale: Scale
    plan: ScalePlan
    rows: Rows
    allocated: Rows  # all that have a row in caches and conditioning
    cond: Any  # of those
    returns: bool = False  # an inactive image will run later scales

    @functools.cached_property
    def row_indices(self) -> Tensor | None:
        """Indices of the rows among the allocated ones; None = all of them."""
        return None if self.rows == self.allocated else row_indices(self.rows, self.allocated)


@dataclass(frozen=True)
class ScaleOutput:
    """What a scale made of the images that ran it; maps and tokens may be those of all images."""

    features: Tensor  # [b, d, H, W]
    tokens: Tensor  # [b, N] indices or [b, N, d] bits
    logits: Tensor  # guided, before top-k and top-p
    raw: Tensor  # logits of every row, before temperature and guidance
    hidden: Tensor  # output of the last block, [R, N, C]
    ctx: ScaleContext
    report: Mapping[str, Numbers]  # what the policy reports to the host


class Executor(ABC):
    """Run the scales of a call one after the other, then decode."""

    name: ClassVar[str]
    overwrites: ClassVar[bool] = False  # whether the next scale writes into the tensors of a ScaleOutput
    text_buckets: tuple[int, ...] = ()  # prompts are padded to the next of these lengths; () = to the longest
    captured: int = 0  # scales, as CUDA graphs
    grown: int = 0  # times that pages were added to KV caches
    warming_up: bool = False  # calls are made for what they leave behind, and nobody looks at their images

    @abstractmethod
    def open(self, call: CallContext, inputs: tuple[Tensor | None, ...], images: int, guided: bool) -> GenerationState:
        """Begin a call: `inputs` is its condition as the backbone read it."""

    @abstractmethod
    def run_scale(self, call: CallContext, batch: ScaleBatch, features: Tensor, kv: Sequence[KVCache]) -> ScaleOutput:
        """Go from the maps so far [B, d, H, W] to those with this scale in them."""

    @abstractmethod
    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        """Decode maps [B, d, H, W] to images [B, 3, H, W] in [-1, 1]."""

    def preview(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        """Decode maps of any number and size between two scales, when `decode` may not use what the scales use."""
        return tokenizer.decode(features)

    def padded_batch(self, images: int, backbone: Backbone, noise: NoiseSource, forced_tokens: Sequence[Tensor]) -> int:
        """Say how many images a call of so many is padded to; the others never run."""
        return images

    def check(self, backbone: Backbone) -> None:
        """Complain about scales whose logits were not finite. Asked when the host has nothing else to do."""

    def supports_inactive_rows(self, backbone: Backbone) -> bool:
        """Whether scales are captured in which rows may be inactive."""
        return False

    def on_warmed_up(self, batches: Sequence[int]) -> None:
        """Remember that what calls of so many images need is there."""

    def forget(self) -> None:
        """Let go of what is kept between calls."""

    def forget_others(self) -> bool:
        """Let go of what is kept for calls of other shapes; whether there was anything."""
        return False
