"""What belongs to one call and dies with it: rows, KV cache, features, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nextscale.cache.kv import LayerCache
from nextscale.engine.schedule import Scale, Schedule
from nextscale.errors import NextscaleError
from nextscale.io.arguments import shown
from nextscale.models.base import Backbone

if TYPE_CHECKING:
    from nextscale.methods.base import ScalePlan


@dataclass(frozen=True)
class Rows:
    """The rows at work in one scale: a conditional one per image, then the unconditional ones."""

    which: tuple[int, ...]  # images of the call, one per conditional row
    unconditional: tuple[int, ...]  # images that have an unconditional row

    @property
    def images(self) -> int:
        return len(self.which)

    @property
    def all(self) -> tuple[int, ...]:
        """The image of every row."""
        return self.which + self.unconditional

    @property
    def guided(self) -> Tensor | None:
        """Places of the guided images among the conditional rows; None = all or none of them."""
        if not self.unconditional or self.unconditional == self.which:
            return None
        return torch.tensor([self.which.index(i) for i in self.unconditional])

    def spread(self, x: Tensor) -> Tensor:
        """One entry per image -> one per row."""
        if not self.unconditional:
            return x
        return torch.cat((x, x if self.guided is None else x[self.guided.to(x.device)]))


class GenerationState:
    """One call. Rows leave for good when their image stops or is no longer guided; then they give up their places in
    caches and state, or keep them and rest, where captured scales know the places of all others."""

    def __init__(
        self,
        backbone: Backbone,
        cond: Any,
        features: Tensor,
        schedule: Schedule,
        guided: bool,
        kv: list[LayerCache] | None = None,
        tokens: list[Tensor] | None = None,
        stays: bool = False,
    ) -> None:
        """`kv` and `tokens`: where they have to be; else they are made. `stays`: nobody gives up a place."""
        images = tuple(range(len(features)))
        self.rows = Rows(images, images if guided else ())  # that have not left
        self.placed = self.rows  # that have a place
        self.stays = stays
        self.cond = cond  # of those
        self.features = features
        self.asked = len(images)  # for: the others are there to fill up a batch, and never run
        self.schedule = schedule
        self.stopped_after: list[int | None] = [None] * len(images)
        # Per scale [B, N] or [B, N, d]; -1 where an image did not run.
        shapes = [(len(images), s.tokens, *backbone.token_shape) for s in schedule]
        self.tokens = tokens or [torch.full(shape, -1, dtype=torch.int32, device=features.device) for shape in shapes]
        like = len(self.rows.all), backbone.heads, backbone.head_dim, backbone.dtype, backbone.device
        self.kv = kv or [LayerCache.without_room(*like) for _ in range(backbone.depth)]

    def reserve(self, tokens: int) -> None:
        for cache in self.kv:
            cache.reserve(tokens)

    def admit(self, images: int) -> None:
        """So many of the pictures are asked for."""
        self.asked = images
        self.rows = Rows(*(tuple(i for i in some if i < images) for some in (self.rows.which, self.rows.unconditional)))

    def apply(self, plan: ScalePlan, scale: Scale) -> Rows:
        """The rows that run this scale."""
        actions, rows = plan.actions, self.rows
        for image in rows.which:
            if actions[image] == "stop":
                self.stopped_after[image] = scale.index  # scales 1..index of this image were generated
        self.rows = Rows(
            tuple(i for i in rows.which if actions[i] != "stop"),
            tuple(i for i in rows.unconditional if actions[i] != "stop" and plan.guided[i]),
        )
        self._give_up_places()
        active = Rows(
            tuple(i for i in self.rows.which if actions[i] == "run"),
            tuple(i for i in self.rows.unconditional if actions[i] == "run"),
        )
        if active.all and plan.capacity:
            self.reserve(plan.capacity)
        return active

    def _give_up_places(self) -> None:
        placed = self.rows
        if self.stays:  # unless all unconditional rows do, which lie behind the others
            placed = Rows(self.placed.which, self.placed.which if self.rows.unconditional else ())
        if placed == self.placed:
            return
        places = places_of(placed, self.placed)
        first = places.tolist() == list(range(len(places)))  # nothing moves: those that leave are at the end
        index = slice(len(places)) if first else places.to(self.features.device)
        self.cond = self.cond.take(index)
        for cache in self.kv:
            cache.keep_rows(index)
        self.placed = placed

    @property
    def maps(self) -> Tensor:
        """Features of the pictures that are asked for."""
        return self.features[: self.asked]

    def store(self, rows: Rows, scale: Scale, features: Tensor, tokens: Tensor) -> None:
        """Put a scale's result back: of the images that ran it, or of all, with those that rest as they were."""
        if len(features) == len(self.features):  # lists would be copied to the device, which the host waits for
            self.features = features
            if tokens is not self.tokens[scale.index]:
                self.tokens[scale.index].copy_(tokens)
            return
        which = list(rows.which)
        self.features = self.features.clone()
        self.features[which] = features
        self.tokens[scale.index][which] = tokens.to(torch.int32)

    def replace_features(self, features: Any) -> None:
        """The caller goes on with maps of its own."""
        if not isinstance(features, Tensor):
            allowed = "None, False to stop, or a tensor like `features`"
            raise NextscaleError(f"the callback returned {shown(features)}; allowed: {allowed}")
        if features.shape != self.maps.shape:
            raise NextscaleError(
                f"the callback returned features of shape {list(features.shape)}, not {list(self.maps.shape)}"
            )
        self.features = torch.cat((features.to(self.features), self.features[self.asked :]))

    def release(self) -> None:
        """After the last scale only features and tokens are needed; the decoder can have the memory."""
        self.kv.clear()
        self.cond = None

    def stop(self, scale: Scale) -> None:
        """The caller ends the run after `scale`."""
        for image in self.rows.which:
            if scale.index + 1 < len(self.schedule):
                self.stopped_after[image] = scale.index + 1


def not_finite(raw_is: bool, scale: Scale, backbone: Backbone) -> NextscaleError:
    """The logits of a scale are not; why? `raw_is`: they were, before temperature and guidance."""
    cause = "guidance_scale or temperature is too extreme"
    if not raw_is:
        cause = cause_of_nan(backbone, "prompt_embeds, the features")
    return NextscaleError(f"the logits of scale {scale.index + 1} are not finite: {cause}")


def cause_of_nan(module: nn.Module, inputs: str) -> str:
    bad = [name for name, p in module.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        return f"the weights of {', '.join(bad[:3])} hold NaN or infinite values"
    return f"{inputs} or a tokenizer weight hold NaN or infinite values, or numbers overflowed"


def places_of(some: Rows, among: Rows) -> Tensor:
    """Row numbers of `some` within `among`."""
    conditional = [among.which.index(i) for i in some.which]
    unconditional = [len(among.which) + among.unconditional.index(i) for i in some.unconditional]
    return torch.tensor(conditional + unconditional, dtype=torch.long)
