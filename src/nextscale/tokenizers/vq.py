"""VAR's tokenizer: multi-scale residual vector quantization with phi convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.engine.schedule import Scale, Schedule
from nextscale.io.config import MAX_BLOCKS, Config, Limits
from nextscale.tokenizers.autoencoder import AUTOENCODER_LIMITS, Decoder, Encoder
from nextscale.tokenizers.base import ImageTokenizer


@dataclass(frozen=True)
class VQConfig(Config):
    limits: ClassVar[Limits] = {**AUTOENCODER_LIMITS, "phis": (0, MAX_BLOCKS)}

    vocabulary: int = 4096
    code_dim: int = 32
    channels: int = 160
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    residual_blocks: int = 2
    phis: int = 4  # 4 = shared by neighboring scales, 1 = by all, the number of scales = one each, 0 = none
    phi_ratio: float = 0.5
    normalized: bool = False  # nearest code by cosine instead of by distance
    hybrid: bool = False  # HART: the last scale's codes are completed by a residual, and pass through no phi


# Which of 4 phis serves each of K scales. The rule below has exact ties at K = 10, which only the float64
# rounding of the original's linspace decided; so the results of the original are written down.
_PHI_OF_SCALE = {
    5: (0, 1, 2, 2, 3),
    6: (0, 0, 1, 2, 3, 3),
    7: (0, 0, 1, 2, 2, 3, 3),
    8: (0, 0, 1, 1, 2, 2, 3, 3),
    9: (0, 0, 1, 1, 2, 2, 2, 3, 3),
    10: (0, 0, 1, 1, 1, 2, 2, 3, 3, 3),
    14: (0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3),
}


def phi_of_scale(phis: int, scales: int) -> tuple[int, ...]:
    """The phi that is nearest on [0, 1] to each scale."""
    if phis == 4 and scales in _PHI_OF_SCALE:
        return _PHI_OF_SCALE[scales]
    edge = 1 / 3 / phis if phis == 4 else 1 / 2 / phis
    ticks = np.linspace(edge, 1 - edge, phis)
    return tuple(int(np.argmin(np.abs(ticks - k / max(scales - 1, 1)))) for k in range(scales))


class VQTokenizer(ImageTokenizer):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.stride = 2 ** (len(config.multipliers) - 1)
        d = config.code_dim
        shape = (config.channels, config.multipliers, d, config.residual_blocks, True)
        self.encoder = Encoder(*shape)
        self.decoder = Decoder(*shape)
        self.quant_conv = nn.Conv2d(d, d, 3, padding=1)
        self.post_quant_conv = nn.Conv2d(d, d, 3, padding=1)
        self.codebook = nn.Embedding(config.vocabulary, d)
        self.phi = nn.ModuleList(nn.Conv2d(d, d, 3, padding=1) for _ in range(config.phis))

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.conv_in.weight.dtype

    def empty_features(self, batch: int, schedule: Schedule) -> Tensor:
        shape = batch, self.config.code_dim, *schedule.last
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def codes(self, tokens: Tensor) -> Tensor:
        return self.codebook(tokens)

    def soft_codes(self, probs: Tensor) -> Tensor:
        return probs @ self.codebook.weight

    def upsample_codes(self, codes: Tensor, scale: Scale, schedule: Schedule) -> Tensor:
        h = codes.transpose(1, 2).unflatten(2, scale.grid)
        last = scale.index == len(schedule) - 1
        if not last:
            h = F.interpolate(h, size=schedule.last, mode="bicubic")
        if not len(self.phi) or (last and self.config.hybrid):
            return h
        phi = self.phi[phi_of_scale(len(self.phi), len(schedule))[scale.index]]
        ratio = self.config.phi_ratio
        return h * (1 - ratio) + phi(h) * ratio

    def inputs(self, features: Tensor, scale: Scale) -> Tensor:
        return F.interpolate(features, size=scale.grid, mode="area").flatten(2).transpose(1, 2)

    def nearest(self, z: Tensor) -> Tensor:
        """The code nearest to each vector [..., d]."""
        book = self.codebook.weight
        flat = z.reshape(-1, z.shape[-1])
        if self.config.normalized:
            index = (F.normalize(flat, dim=-1) @ F.normalize(book.T, dim=0)).argmax(dim=1)
        else:
            distance = flat.square().sum(1, keepdim=True) + book.square().sum(1)
            index = distance.addmm(flat, book.T, alpha=-2).argmin(dim=1)
        return index.view(z.shape[:-1])

    def encode_features(self, images: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(images.to(self.dtype)).float())

    def quantize(self, residual: Tensor, scale: Scale) -> Tensor:
        z = (
            residual
            if tuple(residual.shape[-2:]) == scale.grid
            else F.interpolate(residual, size=scale.grid, mode="area")
        )
        return self.nearest(z.flatten(2).transpose(1, 2))

    @torch.no_grad()
    def decode(self, features: Tensor, decoder: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        z = self.post_quant_conv(features)
        return (self.decoder if decoder is None else decoder)(z.to(self.dtype)).float().clamp(-1, 1)
