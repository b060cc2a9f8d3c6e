"""What the user's callback sees after a scale, and what its answer does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.engine.state import GenerationState
from nextscale.io.arguments import is_flag

if TYPE_CHECKING:
    from nextscale.runtime.base import CallContext, Executor, ScaleBatch, ScaleOutput


@dataclass(frozen=True)
class ScaleEnd:
    """What a callback sees after a scale.

    It may return False to end the run, a set of images that shall leave it, or a tensor like `features` to go on with
    instead.
    """

    scale: Scale
    images: tuple[int, ...]  # the images that ran, one per row of the tensors below
    features: Tensor  # the accumulated maps of ALL images, [B, d, H, W]
    tokens: Tensor  # [b, N] indices or [b, N, d] bits
    logits: Tensor  # guided, before top-k and top-p
    raw_logits: Tensor  # of every row, before temperature and guidance
    hidden: Tensor  # output of the last block, [R, N, C]
    decode: Callable[..., Tensor]  # the image so far, [B, 3, H, W] in [-1, 1]; or of maps like `features`
    computed: Callable[[int], np.ndarray]  # of an image: the share of layers that computed each cell, [h, w]

    def copied(self) -> ScaleEnd:
        """Copy the tensors that the next scale may overwrite."""
        tokens, logits, raw = self.tokens.clone(), self.logits.clone(), self.raw_logits.clone()
        return dataclasses.replace(self, tokens=tokens, logits=logits, raw_logits=raw, hidden=self.hidden.clone())


Callback = Callable[[ScaleEnd], "bool | set[int] | Tensor | None"]


def after_scale(
    callback: Callback,
    call: CallContext,
    executor: Executor,
    state: GenerationState,
    batch: ScaleBatch,
    output: ScaleOutput,
) -> bool:
    """Show a scale to the callback and do as it answers; False ends the run."""
    rows = batch.rows
    tokens = output.tokens if len(output.tokens) == rows.images else output.tokens[list(rows.image_ids)]
    maps = state.maps
    computed = partial(state.trace.computed, scale=batch.scale.index + 1)
    shown = maps, tokens, output.logits, output.raw, output.hidden

    def decode(features: Tensor | None = None) -> Tensor:
        return executor.preview(call.tokenizer, maps if features is None else features)

    end = ScaleEnd(batch.scale, rows.image_ids, *shown, decode, computed)
    answer = callback(end)
    if is_flag(answer):
        if not answer:
            state.stop(batch.scale)
        return bool(answer)
    if isinstance(answer, (set, frozenset)):
        state.leave(answer)
    elif answer is not None:
        state.replace_features(answer)
    return True
