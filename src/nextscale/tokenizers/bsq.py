"""Infinity's tokenizer: binary spherical quantization, one sign per channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.engine.schedule import Grid, Scale, Schedule
from nextscale.errors import NextscaleError
from nextscale.io.config import Config, Limits
from nextscale.kernels import feature_maps
from nextscale.tokenizers.autoencoder import AUTOENCODER_LIMITS, Decoder, Encoder
from nextscale.tokenizers.base import ImageTokenizer


@dataclass(frozen=True)
class BSQConfig(Config):
    limits: ClassVar[Limits] = {**AUTOENCODER_LIMITS, "fold": (1, 16)}

    code_dim: int  # channels of the latent map
    channels: int = 128
    multipliers: tuple[int, ...] = (1, 2, 4, 4, 4)
    residual_blocks: int = 2
    patchify: bool = False  # a token holds 2 x 2 cells of the latent map (Infinity-8B)
    fold: int = 1  # pixels per side that enter and leave the autoencoder as channels (the embedded model: 2)


class BSQTokenizer(ImageTokenizer):
    def __init__(self, config: BSQConfig) -> None:
        super().__init__()
        self.config = config
        self.fold = config.fold
        self.patch = 2 if config.patchify else 1  # latent cells per token side
        self.stride = 2 ** (len(config.multipliers) - 1) * self.patch * config.fold
        shape = (config.channels, config.multipliers, config.code_dim, config.residual_blocks, False, config.fold)
        self.encoder = Encoder(*shape)
        self.decoder = Decoder(*shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.conv_in.weight.dtype

    @property
    def bits(self) -> int:
        """Bits per token."""
        return self.config.code_dim * self.patch**2

    def latent(self, grid: Grid) -> Grid:
        return grid[0] * self.patch, grid[1] * self.patch

    def empty_features(self, batch: int, schedule: Schedule) -> Tensor:
        shape = batch, self.config.code_dim, *self.latent(schedule.last)
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def codes(self, tokens: Tensor) -> Tensor:
        # Scaled so that a latent cell's code has length 1, also when a token holds several cells.
        unit = 1 / self.config.code_dim**0.5
        return (tokens * (2 * unit) - unit).float()  # whole numbers times a float have the caller's default dtype

    def soft_codes(self, probs: Tensor) -> Tensor:
        raise NextscaleError("smoothed sampling mixes the codes of a codebook, and this model predicts bits")

    def to_map(self, tokens: Tensor, grid: Grid) -> Tensor:
        """[B, N, d] in token order -> latent map [B, code_dim, h, w]."""
        return F.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, grid), self.patch)

    def from_map(self, latent: Tensor) -> Tensor:
        return F.pixel_unshuffle(latent, self.patch).flatten(2).transpose(1, 2)

    def upsample_codes(self, codes: Tensor, scale: Scale, schedule: Schedule) -> Tensor:
        return resize(self.to_map(codes, scale.grid), self.latent(schedule.last))

    def add(self, features: Tensor, codes: Tensor, scale: Scale, schedule: Schedule) -> Tensor:
        if feature_maps.supports(features):
            return feature_maps.fused_add(features, codes, scale.grid, self.patch)
        return super().add(features, codes, scale, schedule)

    def inputs(self, features: Tensor, scale: Scale) -> Tensor:
        if feature_maps.supports(features):
            return feature_maps.fused_inputs(features, scale.grid, self.patch)
        return self.from_map(resize(features, self.latent(scale.grid)))

    def encode_features(self, images: Tensor) -> Tensor:
        return self.encoder(images.to(self.dtype)).float()

    def quantize(self, residual: Tensor, scale: Scale) -> Tensor:
        grid = self.latent(scale.grid)
        z = residual if tuple(residual.shape[-2:]) == grid else F.interpolate(residual, size=grid, mode="area")
        return self.from_map((z > 0).float()).to(torch.uint8)

    @torch.no_grad()
    def decode(self, features: Tensor, decoder: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return (self.decoder if decoder is None else decoder)(features.to(self.dtype)).float().clamp(-1, 1)


def resize(x: Tensor, grid: Grid) -> Tensor:
    return x if tuple(x.shape[-2:]) == grid else F.interpolate(x, size=grid, mode="bilinear")
