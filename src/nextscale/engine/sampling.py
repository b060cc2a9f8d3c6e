"""From logits to tokens and codes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nextscale.engine.guidance import Number, on_device, per_scale
from nextscale.engine.rng import NoiseSource, PerImageNoise
from nextscale.engine.schedule import Scale, Schedule
from nextscale.errors import NextscaleError
from nextscale.io.arguments import is_single, read_count, read_list, read_number, short_repr
from nextscale.kernels import bit_sampling

if TYPE_CHECKING:
    from nextscale.models.base import Backbone
    from nextscale.tokenizers.base import ImageTokenizer

NOTHING = -1  # the token of a cell that added nothing to the map
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MAX_PARTIAL_SORT = 1024  # codes: to find a top k among them takes less memory than to sort the whole codebook


class ScaleSettings(NamedTuple):
    """Settings of a scale that are but numbers: calls that differ in them run the same code."""

    weight: Number  # of guidance
    by: Number  # multiplies the logits: 1 / temperature
    top_k: Number
    top_p: Number


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; a tuple has one value per scale."""

    guidance: tuple[float, ...]  # 1 = none
    temperature: tuple[float, ...]  # divides the logits
    progress: tuple[float, ...]  # 0 at the first scale to 1 at the last; sets the smoothing
    top_k: tuple[int, ...]  # 0 = off
    top_p: float = 0.0  # 0 = off
    greedy: bool = False
    smooth: bool = False  # codes are a Gumbel-softmax mixture instead of one code (VAR, HART)
    guidance_layers: tuple[int, ...] = (0,)  # 0 = on the logits, -n = after the n-th block from the end

    def __post_init__(self) -> None:
        if not 0 <= self.top_p <= 1:
            raise NextscaleError(f"top_p must lie in [0, 1] (0 = off), not {self.top_p}")
        if any(t <= 0 for t in self.temperature):
            raise NextscaleError(f"temperature must be above 0 (greedy=True for none), not {min(self.temperature)}")
        if self.greedy and self.smooth:
            raise NextscaleError("greedy and smooth contradict each other: choose one")

    @classmethod
    def make(
        cls,
        scales: int,
        guidance: tuple[float, ...],
        progress: tuple[float, ...] | None = None,
        temperature: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        top_p: float = 0.0,
        **rest: Any,
    ) -> Sampling:
        """Single numbers hold for every scale; `guidance` comes in its final form from the backbone."""
        ks = [top_k] if is_single(top_k) else read_list(top_k, "top_k", "a whole number or a list of them")
        ks = [read_count(k, "top_k (0 = off)") for k in ks or [0]]
        return cls(
            guidance,
            per_scale(temperature, scales, "temperature"),
            progress or tuple(k / max(scales - 1, 1) for k in range(scales)),
            (*ks, *ks[-1:] * scales)[:scales],
            read_number(top_p, "top_p", "a number in [0, 1] (0 = off)"),
            **rest,
        )

    @property
    def guided_until(self) -> int:
        """The number of scales after which no scale is guided any more."""
        return max((k + 1 for k, weight in enumerate(self.guidance) if weight != 1), default=0)

    def settings(self, scale: int) -> ScaleSettings:
        return ScaleSettings(self.guidance[scale], 1 / self.temperature[scale], self.top_k[scale], self.top_p)

    def stacked_settings(self, pinned: bool = False) -> Tensor:
        """Stack the settings of every scale, [scales, 4], for a device."""
        rows = [self.settings(scale) for scale in range(len(self.guidance))]
        return torch.tensor(rows, dtype=torch.float64, pin_memory=pinned)

    @property
    def max_top_k(self) -> int | None:
        """How many of the likeliest codes a filter on the device sorts: 0 if it is off, None = all."""
        most = max(self.top_k)
        return None if self.top_p or most > MAX_PARTIAL_SORT else MAX_PARTIAL_SORT if most else 0

    def graph_key(self, bits: bool) -> Hashable:
        """What decides which code runs, apart from the schedule and the rows of a scale."""
        filters = None if self.greedy or bits else self.max_top_k
        return self.guided_until, self.progress, self.greedy, self.smooth, self.guidance_layers, filters


@dataclass
class Sampled:
    """What one scale added. Tokens are [B, N] indices or [B, N, d] bits."""

    tokens: Tensor
    codes: Tensor  # [B, N, d], a mixture when smoothed


def keep_top(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Everything outside the top k, then outside the nucleus, becomes -inf; ties with the k-th stay."""
    if logits.shape[-1] == 2 and top_k != 1:  # a bit needs no sorting: only the less likely value can be outside
        unlikely = (logits.softmax(dim=-1) <= 1 - top_p) & (logits < logits.amax(dim=-1, keepdim=True))
        return logits.masked_fill(unlikely, -torch.inf) if top_p else logits
    if top_k:
        lowest = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values.amin(dim=-1, keepdim=True)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if top_p:
        ordered, order = logits.sort(dim=-1)
        outside = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        outside[..., -1] = False
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits


def keep_top_on_device(logits: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int | None) -> Tensor:
    """Filter as `keep_top` does, by numbers that only the device knows."""
    values = logits.shape[-1]
    rest = torch.where(top_p > 0, 1 - top_p, -1).to(logits.dtype)  # no share is as small
    if values == 2:
        rest = torch.where(top_k == 1, 1, rest)
        unlikely = (logits.softmax(dim=-1) <= rest) & (logits < logits.amax(dim=-1, keepdim=True))
        return logits.masked_fill(unlikely, -torch.inf)
    if max_top_k == 0:
        return logits
    if max_top_k is not None:
        highest = logits.topk(min(max_top_k, values), dim=-1).values
        lowest = highest.index_select(-1, (top_k.long() - 1).clamp(0, highest.shape[-1] - 1)[None])
        return logits.masked_fill((logits < lowest) & (top_k > 0), -torch.inf)
    ordered, order = logits.sort(dim=-1)
    lowest = ordered.index_select(-1, torch.where(top_k > 0, values - top_k, 0).long().clamp_min(0)[None])
    ordered = ordered.masked_fill(ordered < lowest, -torch.inf)
    outside = (ordered.softmax(dim=-1).cumsum(dim=-1) <= rest) | (ordered == -torch.inf)
    outside[..., -1] = False
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)


def sample(
    logits: Tensor,
    scale: Scale,
    sampling: Sampling,
    settings: ScaleSettings,
    noise: NoiseSource,
    images: Sequence[int],
    tokenizer: ImageTokenizer,
    forced: Tensor | None = None,
) -> Sampled:
    """Choose a token for every cell. `forced` replaces the choice, but the random numbers are still drawn."""
    top_k, top_p = settings.top_k, settings.top_p
    if sampling.greedy:
        tokens = logits.argmax(dim=-1)
    elif bit_sampling.supports(logits) and isinstance(noise, PerImageNoise):
        tokens = bit_sampling.fused_draw(logits, noise.race(logits, scale.index, images), top_p, top_k)
    else:
        if on_device(top_k) and on_device(top_p):
            logits = keep_top_on_device(logits, top_k, top_p, sampling.max_top_k)
        else:
            logits = keep_top(logits, int(top_k), float(top_p))
        tokens = noise.categorical(logits.softmax(dim=-1), scale.index, images)
    if forced is None and sampling.smooth:
        # Temperature falls with the scale, as in MaskGIT; the constants are the official ones.
        ratio = sampling.progress[scale.index]
        noisy = logits.mul(1 + ratio) + noise.gumbel(logits, scale.index, images)
        mixture = (noisy / max(0.27 * (1 - ratio * 0.95), 0.005)).softmax(dim=-1)
        return Sampled(tokens, tokenizer.soft_codes(mixture))
    if forced is not None:
        tokens = forced.clamp_min(0)
    return Sampled(tokens, tokenizer.codes(tokens))


def read_forced(tokens: Any, schedule: Schedule, images: int, backbone: Backbone) -> list[Tensor]:
    """Tokens of the first scales as the user gives them, checked; one set may stand for all images."""
    if not isinstance(tokens, (list, tuple)):
        raise NextscaleError(f"force_tokens must be a list of tensors, one for each scale, not {short_repr(tokens)}")
    if len(tokens) > len(schedule):
        raise NextscaleError(f"force_tokens has {len(tokens)} scales, the schedule {len(schedule)}")
    forced = []
    for scale, given in zip(schedule, tokens, strict=False):
        where, shape = f"force_tokens of scale {scale.index + 1}", (scale.tokens, *backbone.token_shape)
        try:
            t = torch.as_tensor(given, device=backbone.device)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise NextscaleError(f"{where} must be a tensor of whole numbers, not {short_repr(given)}") from None
        if t.dtype not in WHOLE or t.layout != torch.strided:
            raise NextscaleError(f"{where} must be whole numbers, not {short_repr(t)}")
        t = t.long()
        if t.shape == shape:
            t = t.expand(images, *shape)
        if t.shape != (images, *shape):
            raise NextscaleError(f"{where} have shape {list(t.shape)}, not {[images, *shape]}")
        if t.min() < NOTHING or t.max() >= backbone.token_values:
            raise NextscaleError(f"{where} must lie in 0..{backbone.token_values - 1}, or be {NOTHING} (adds nothing)")
        forced.append(t)
    return forced
