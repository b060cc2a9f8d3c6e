"""The convolutional encoder and decoder that VAR's, HART's and Infinity's tokenizers share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.io.config import Limits

# The range of every number of a configuration.
AUTOENCODER_LIMITS: Limits = {"multipliers": (1, 64), "residual_blocks": (1, 16), "channels": (1, 2**14)}


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1 = group_norm(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.norm2 = group_norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(channels, out, 1) if channels != out else None

    def forward(self, x: Tensor) -> Tensor:
        # At full size these maps decide the memory of a run, so none is kept longer than needed.
        h = self.conv1(F.silu(self.norm1(x), inplace=True))
        h = F.silu(self.norm2(h), inplace=True)
        h = self.conv2(h)
        return (x if self.nin_shortcut is None else self.nin_shortcut(x)) + h


class AttentionBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).chunk(3, dim=1)  # [B, C, HW] each
        scores = torch.bmm(q.transpose(1, 2), k).mul(1 / math.sqrt(q.shape[1]))
        out = torch.bmm(v, scores.softmax(dim=2).transpose(1, 2))
        return x + self.proj_out(out.view_as(x))


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # only right and bottom


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Level(nn.Module):
    """Residual blocks of one resolution, each followed by an attention block where the tokenizer has them."""

    def __init__(self, channels: int, out: int, blocks: int, attention: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResidualBlock(channels if i == 0 else out, out) for i in range(blocks))
        self.attn = nn.ModuleList(AttentionBlock(out) for _ in range(blocks if attention else 0))
        self.downsample: Downsample | None = None
        self.upsample: Upsample | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        for resize in (self.downsample, self.upsample):
            x = x if resize is None else resize(x)
        return x


class Middle(nn.Module):
    def __init__(self, channels: int, attention: bool) -> None:
        super().__init__()
        self.block_1 = ResidualBlock(channels, channels)
        self.attn_1 = AttentionBlock(channels) if attention else None
        self.block_2 = ResidualBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block_1(x)
        return self.block_2(x if self.attn_1 is None else self.attn_1(x))


class Encoder(nn.Module):
    """The encoder. Squares of `fold` x `fold` pixels become channels before the first level: no full-size maps."""

    def __init__(
        self, ch: int, multipliers: Sequence[int], z: int, blocks: int, attention: bool, fold: int = 1
    ) -> None:
        super().__init__()
        widths = [ch * m for m in multipliers]
        last = len(widths) - 1
        self.fold = fold
        self.conv_in = nn.Conv2d(3 * fold**2, ch, 3, padding=1)
        self.down = nn.ModuleList(
            Level(before, width, blocks, attention and i == last)
            for i, (before, width) in enumerate(zip([ch, *widths[:-1]], widths, strict=True))
        )
        for level, width in zip(self.down[:-1], widths, strict=False):
            level.downsample = Downsample(width)
        self.mid = Middle(widths[-1], attention)
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], z, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(F.pixel_unshuffle(x, self.fold))
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    def __init__(
        self, ch: int, multipliers: Sequence[int], z: int, blocks: int, attention: bool, fold: int = 1
    ) -> None:
        super().__init__()
        widths = [ch * m for m in multipliers]
        last = len(widths) - 1
        self.fold = fold
        self.conv_in = nn.Conv2d(z, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], attention)
        # up.0 is the full resolution, so the levels run backwards; one block more than the encoder has.
        self.up = nn.ModuleList(
            Level(before, width, blocks + 1, attention and i == last)
            for i, (before, width) in enumerate(zip([*widths[1:], widths[-1]], widths, strict=True))
        )
        for level, width in zip(self.up[1:], widths[1:], strict=True):
            level.upsample = Upsample(width)
        self.norm_out = group_norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3 * fold**2, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        return F.pixel_shuffle(self.conv_out(F.silu(self.norm_out(x))), self.fold)
