"""How much memory a run will need, before it is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nextscale.engine.schedule import Schedule
from nextscale.errors import NextscaleError
from nextscale.io.devices import total_memory
from nextscale.models.base import Backbone
from nextscale.tokenizers.base import ImageTokenizer

GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """Bytes. Text is encoded, tokens are generated, the image is decoded: of what each phase needs for itself only
    the largest counts. A text encoder that is not offloaded stays beside all of them."""

    weights: int  # of transformer and tokenizer
    text: int  # keys and values of the prompts
    kv_cache: int
    blocks: int  # buffers of the largest scale
    decoder: int
    text_encoder: int = 0  # its weights: loaded, or expected
    offload: bool = False  # whether they leave the device when text is encoded

    @property
    def total(self) -> int:
        generating = max(self.text + self.kv_cache + self.blocks, self.decoder)
        if self.offload:
            return self.weights + max(generating, self.text_encoder)
        return self.weights + self.text_encoder + generating

    def require(self, device: torch.device, images: int, schedule: Schedule) -> None:
        """That a device has as much."""
        have = total_memory(device)
        if have is not None and self.total > have:
            raise NextscaleError(
                f"{images} images of {len(schedule)} scales need about {self.total / GIB:.0f} GiB, but {device} has "
                f"{have / GIB:.0f} GiB; make fewer at a time, or smaller ones"
            )

    def __str__(self) -> str:
        parts = ("weights", "text_encoder", "text", "kv_cache", "blocks", "decoder", "total")
        return ", ".join(f"{name} {getattr(self, name) / GIB:.2f} GiB" for name in parts)


def estimate(
    backbone: Backbone,
    tokenizer: ImageTokenizer,
    schedule: Schedule,
    images: int,
    guided: bool,
    text_length: int = 0,
    weights: int = 0,
) -> Estimate:
    """Of the plain run; no method keeps more tokens. An H200 used this much within a few percent."""
    rows, item = images * (2 if guided else 1), backbone.dtype.itemsize
    tokens = max(h * w for h, w in schedule.grids)
    width, hidden = backbone.width, backbone.hidden
    per_token = (
        4 * 4 * width  # residual stream, its normed copy, a branch before and after the gate, in float32
        + max(item * 8 * width + 4 * 4 * width, item * 2 * hidden)  # q, k, v with float32 copies, or the MLP
    )
    logits = 4 * backbone.logits_per_token
    return Estimate(
        weights=weights,
        text=2 * item * backbone.depth * rows * text_length * width if "cross" in backbone.sublayers else 0,
        kv_cache=2 * item * backbone.depth * rows * (backbone.context + schedule.tokens) * width,
        # Rows of logits, and what sampling makes of those of every image: filtered, sorted, probabilities, noise.
        blocks=tokens * (rows * max(per_token, logits) + images * 5 * logits),
        decoder=images * tokenizer.decoder_bytes(schedule),
    )
