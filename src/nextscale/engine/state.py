"""What belongs to one call and dies with it: rows, KV caches, features, tokens, the trace."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nextscale.cache.kv import KVCache
from nextscale.engine.rows import Rows, row_indices
from nextscale.engine.schedule import Scale, Schedule
from nextscale.engine.trace import Costs, Trace
from nextscale.errors import NextscaleError
from nextscale.io.arguments import short_repr
from nextscale.models.base import Backbone

if TYPE_CHECKING:
    from nextscale.engine.request import Request
    from nextscale.methods.policy import ScalePlan
    from nextscale.runtime.base import ScaleBatch, ScaleOutput


class GenerationState:
    """Rows leave for good when their image stops or is no longer guided. Then caches drop them; or, where captured
    scales hold addresses, they keep their rows there and are inactive."""

    trace: Trace

    def __init__(
        self,
        backbone: Backbone,
        cond: Any,
        features: Tensor,
        schedule: Schedule,
        guided: bool,
        kv: list[KVCache] | None = None,
        tokens: list[Tensor] | None = None,
        static: bool = False,
    ) -> None:
        """`kv` and `tokens` are allocated unless given. `static`: no row is ever dropped from caches."""
        images = tuple(range(len(features)))
        self.rows = Rows(images, images if guided else ())  # that have not left
        self.allocated = self.rows  # that caches and conditioning hold
        self.static = static
        self.cond = cond  # of the allocated rows
        self.features = features
        self.images = len(images)  # that were asked for: the others pad the batch, and never run
        self.schedule = schedule
        self.stopped_after: list[int | None] = [None] * len(images)
        self.leaving: frozenset[int] = frozenset()  # images that the caller wants no more of
        # Per scale [B, N] or [B, N, d]; -1 where a cell added nothing, as all do where an image did not run.
        shapes = [(len(images), s.tokens, *backbone.token_shape) for s in schedule]
        self.tokens = tokens or [torch.full(shape, -1, dtype=torch.int32, device=features.device) for shape in shapes]
        like = len(self.rows.all), backbone.heads, backbone.head_dim, backbone.dtype, backbone.device
        self.kv = kv or [KVCache.empty(*like) for _ in range(backbone.depth)]

    def begin(self, request: Request, kv_tokens: int, backbone: Backbone) -> None:
        """Admit the images that were asked for, and reserve KV entries for each row."""
        self.images = request.images
        ids, unconditional = (
            tuple(i for i in some if i < request.images) for some in (self.rows.image_ids, self.rows.unconditional)
        )
        self.rows = Rows(ids, unconditional)
        self.trace = Trace(Costs.of(backbone), self.schedule, request.traced, request.sampling.guided_until)
        self.allocate(backbone.context + kv_tokens if kv_tokens else 0)

    def allocate(self, tokens: int) -> None:
        for cache in self.kv:
            cache.allocate(tokens)

    def apply(self, plan: ScalePlan, scale: Scale) -> Rows:
        """Drop the rows that leave, and say which run this scale."""
        actions, rows = plan.actions, self.rows
        if self.leaving:
            actions = tuple("stop" if image in self.leaving else action for image, action in enumerate(actions))
        for image in rows.image_ids:
            if actions[image] == "stop":
                self.stopped_after[image] = scale.index  # scales 1..index of this image were generated
        self.rows = Rows(
            tuple(i for i in rows.image_ids if actions[i] != "stop"),
            tuple(i for i in rows.unconditional if actions[i] != "stop" and plan.guided[i]),
        )
        self._drop_rows()
        active = Rows(
            tuple(i for i in self.rows.image_ids if actions[i] == "run"),
            tuple(i for i in self.rows.unconditional if actions[i] == "run"),
        )
        if active.all and plan.capacity:
            self.allocate(plan.capacity)
        return active

    def _drop_rows(self) -> None:
        kept = self.rows
        if self.static:  # unless all unconditional rows leave, which lie behind the others
            ids = self.allocated.image_ids
            kept = Rows(ids, ids if self.rows.unconditional else ())
        if kept == self.allocated:
            return
        rows = row_indices(kept, self.allocated)
        first = rows.tolist() == list(range(len(rows)))  # nothing moves: those that leave are at the end
        index = slice(len(rows)) if first else rows.to(self.features.device)
        self.cond = self.cond.take(index)
        for cache in self.kv:
            cache.keep_rows(index)
        self.allocated = kept

    @property
    def maps(self) -> Tensor:
        """The features of the images that were asked for."""
        return self.features[: self.images]

    def store(self, batch: ScaleBatch, output: ScaleOutput) -> None:
        """Keep a scale's result: of the images that ran it, or of all, with inactive ones unchanged."""
        index, features, tokens = batch.scale.index, output.features, output.tokens
        self.trace.ran(output.ctx, self.cond, batch.row_indices)
        if len(features) == len(self.features):  # lists would be copied to the device, which the host waits for
            self.features = features
            if tokens is not self.tokens[index]:
                self.tokens[index].copy_(tokens)
            return
        ids = list(batch.rows.image_ids)
        self.features = self.features.clone()
        self.features[ids] = features
        self.tokens[index][ids] = tokens.to(torch.int32)

    def replace_features(self, features: Any) -> None:
        """Go on with the caller's maps."""
        if not isinstance(features, Tensor):
            allowed = "None, False to stop, a set of images that leave, or a tensor like `features`"
            raise NextscaleError(f"the callback returned {short_repr(features)}; allowed: {allowed}")
        if features.shape != self.maps.shape:
            raise NextscaleError(
                f"the callback returned features of shape {list(features.shape)}, not {list(self.maps.shape)}"
            )
        self.features = torch.cat((features.to(self.features), self.features[self.images :]))

    def leave(self, images: Collection[Any]) -> None:
        """Let images of the call leave it before the next scale."""
        unknown = [image for image in images if not isinstance(image, int) or not 0 <= image < self.images]
        if unknown:
            raise NextscaleError(
                f"the callback returned the image {short_repr(unknown[0])}; allowed: 0 to {self.images - 1}"
            )
        self.leaving |= set(images)

    def release(self) -> None:
        """Let go of what only the scales need: the decoder can have the memory."""
        self.kv.clear()
        self.cond = None

    def stop(self, scale: Scale) -> None:
        """End the run after `scale`, as the caller wants."""
        for image in self.rows.image_ids:
            if scale.index + 1 < len(self.schedule):
                self.stopped_after[image] = scale.index + 1


def not_finite(raw_is: bool, scale: Scale, backbone: Backbone) -> NextscaleError:
    """Say why the logits of a scale are not finite. `raw_is`: they were, before temperature and guidance."""
    cause = "guidance_scale or temperature is too extreme"
    if not raw_is:
        cause = cause_of_nan(backbone, "prompt_embeds, the features")
    return NextscaleError(f"the logits of scale {scale.index + 1} are not finite: {cause}")


def cause_of_nan(module: nn.Module, inputs: str) -> str:
    bad = [name for name, p in module.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        return f"the weights of {', '.join(bad[:3])} hold NaN or infinite values"
    return f"{inputs} or a tokenizer weight hold NaN or infinite values, or numbers overflowed"
