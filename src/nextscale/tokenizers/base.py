"""What an image tokenizer is: codes <-> accumulated feature map <-> pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nextscale.engine.schedule import Scale, Schedule
from nextscale.errors import NextscaleError
from nextscale.tokenizers.autoencoder import Decoder, Encoder


@dataclass
class Encoded:
    """A picture as the tokenizer sees it."""

    features: Tensor  # encoder output, [B, d, H, W]
    tokens: list[Tensor]  # per scale [B, N] indices or [B, N, d] bits
    maps: list[Tensor]  # accumulated feature map after each scale


class ImageTokenizer(nn.Module, ABC):
    """Scales are those of the transformer; a tokenizer that packs 2 x 2 cells into a token does so inside."""

    config: Any
    encoder: Encoder
    decoder: Decoder
    stride: int  # pixels per token side
    fold: int = 1  # pixels per side of the largest map of the decoder

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device:
        return self.decoder.conv_in.weight.device

    def decoder_bytes(self, schedule: Schedule) -> int:
        """Buffers of the decoder per image, all at full size: maps of a residual block and the workspace of its
        convolutions. The two weights are fitted to what an H200 used (benchmarks/memory.py)."""
        h, w = schedule.last
        first, second = (*self.config.multipliers, self.config.multipliers[-1])[:2]
        outer, inner = self.config.channels * first, self.config.channels * second
        return self.dtype.itemsize * (4 * outer + 3 * inner) * h * w * (self.stride // self.fold) ** 2

    @staticmethod
    def computes_in_dtype(name: str) -> bool:
        return name.startswith(("encoder.", "decoder."))

    @abstractmethod
    def blank(self, batch: int, schedule: Schedule) -> Tensor:
        """The empty feature map, at the size of the last scale, float32."""

    @abstractmethod
    def codes(self, tokens: Tensor) -> Tensor:
        """Tokens -> codes [B, N, d]."""

    @abstractmethod
    def mixture(self, probs: Tensor) -> Tensor:
        """A weighted mixture of all codes: [B, N, V] -> [B, N, d]."""

    @abstractmethod
    def increment(self, codes: Tensor, scale: Scale, schedule: Schedule) -> Tensor:
        """What a scale's codes [B, N, d] add to the full-size map."""

    def add(self, features: Tensor, codes: Tensor, scale: Scale, schedule: Schedule) -> Tensor:
        """The feature map after a scale's codes were added to it."""
        return features + self.increment(codes, scale, schedule)

    @abstractmethod
    def inputs(self, features: Tensor, scale: Scale) -> Tensor:
        """What the transformer is told of the map so far when it predicts `scale`: [B, N, d]."""

    @abstractmethod
    def analyze(self, images: Tensor) -> Tensor:
        """The encoder alone: images in [-1, 1] -> features [B, d, H, W], float32."""

    @abstractmethod
    def quantize(self, rest: Tensor, scale: Scale) -> Tensor:
        """The tokens of a scale that come nearest to what is left of the features."""

    @torch.no_grad()
    def encode(self, images: Tensor, schedule: Schedule) -> Encoded:
        """Images [B, 3, H, W] in [-1, 1] -> tokens of every scale: each describes what the earlier ones left over."""
        self.encoder.to(self.device)  # who only decodes may have put it elsewhere
        rest = self.analyze(images)
        want = self.blank(1, schedule).shape[2:]
        if rest.shape[2:] != want:
            h, w = (n * self.stride for n in schedule.last)
            have = "x".join(str(n) for n in images.shape[2:])
            raise NextscaleError(f"images of {have} were given for a schedule of {h}x{w} (height x width)")
        result = Encoded(rest, [], [])
        total = torch.zeros_like(rest)
        for scale in schedule:
            tokens = self.quantize(rest, scale)
            increment = self.increment(self.codes(tokens), scale, schedule)
            rest, total = rest - increment, total + increment
            result.tokens.append(tokens)
            result.maps.append(total)
        return result

    @abstractmethod
    def decode(self, features: Tensor, decoder: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Feature map -> images [B, 3, H, W] in [-1, 1]; `decoder` may stand in for the tokenizer's own."""
