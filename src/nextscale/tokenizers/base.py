"""The interface of image tokenizers: codes <-> accumulated feature map <-> pixels."""

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
    """An image as the tokenizer sees it."""

    features: Tensor  # encoder output, [B, d, H, W]
    tokens: list[Tensor]  # per scale [B, N] indices or [B, N, d] bits
    maps: list[Tensor]  # accumulated feature map after each scale


class ImageTokenizer(nn.Module, ABC):
    """A tokenizer of images. Scales are those of the transformer; it may pack 2 x 2 cells into a token."""

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
    def empty_features(self, batch: int, schedule: Schedule) -> Tensor:
        """The empty feature map, at the size of the last scale, float32."""

    @abstractmethod
    def codes(self, tokens: Tensor) -> Tensor:
        """Tokens -> codes [B, N, d]."""

    @abstractmethod
    def soft_codes(self, probs: Tensor) -> Tensor:
        """A weighted mixture of all codes: [B, N, V] -> [B, N, d]."""

    @abstractmethod
    def upsample_codes(self, codes: Tensor, scale: Scale, schedule: Schedule) -> Tensor:
        """The codes [B, N, d] of a scale as an increment of the full-size map."""

    def add(self, features: Tensor, codes: Tensor, scale: Scale, schedule: Schedule) -> Tensor:
        """The feature map after a scale's codes were added to it."""
        return features + self.upsample_codes(codes, scale, schedule)

    @abstractmethod
    def inputs(self, features: Tensor, scale: Scale) -> Tensor:
        """The map so far as the transformer reads it when it predicts `scale`: [B, N, d]."""

    @abstractmethod
    def encode_features(self, images: Tensor) -> Tensor:
        """The encoder alone: images in [-1, 1] -> features [B, d, H, W], float32."""

    @abstractmethod
    def quantize(self, residual: Tensor, scale: Scale) -> Tensor:
        """The tokens of a scale that come nearest to the residual of the features."""

    @torch.no_grad()
    def encode(self, images: Tensor, schedule: Schedule) -> Encoded:
        """Images [B, 3, H, W] in [-1, 1] -> tokens of every scale: each describes the residual of the earlier ones."""
        self.encoder.to(self.device)  # callers that only decode may have moved it
        residual = self.encode_features(images)
        want = self.empty_features(1, schedule).shape[2:]
        if residual.shape[2:] != want:
            h, w = (n * self.stride for n in schedule.last)
            have = "x".join(str(n) for n in images.shape[2:])
            raise NextscaleError(f"images of {have} were given for a schedule of {h}x{w} (height x width)")
        result = Encoded(residual, [], [])
        total = torch.zeros_like(residual)
        for scale in schedule:
            tokens = self.quantize(residual, scale)
            increment = self.upsample_codes(self.codes(tokens), scale, schedule)
            residual, total = residual - increment, total + increment
            result.tokens.append(tokens)
            result.maps.append(total)
        return result

    @abstractmethod
    def decode(self, features: Tensor, decoder: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Feature map -> images [B, 3, H, W] in [-1, 1]; `decoder` may stand in for the tokenizer's own."""
