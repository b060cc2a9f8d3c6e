"""The decoder on a GPU: channels last, fewer passes over the maps, four ninths of the arithmetic to upsample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.kernels.conv import convolve
from nextscale.kernels.conv_out import norm_and_conv, taps
from nextscale.kernels.fp8 import input_format
from nextscale.kernels.group_norm import group_norm
from nextscale.models.flat_parameters import flatten_parameters
from nextscale.tokenizers.autoencoder import Decoder, Level, ResidualBlock
from nextscale.tokenizers.base import ImageTokenizer

# Of the 3 taps of a convolution over a doubled line, those that fall on one cell: row k is tap k of the 4 taps of a
# transposed convolution of stride 2.
TAPS = ((0, 0, 1), (0, 1, 1), (1, 1, 0), (1, 0, 0))
MAX_DECODE_CELLS = 2**20  # cells of the largest maps: more of them are no faster, and take memory


def upsample_conv_weight(weight: Tensor) -> Tensor:
    """Merge nearest x 2 and a 3 x 3 convolution into the kernel of one transposed convolution."""
    taps = torch.tensor(TAPS, dtype=torch.float64, device=weight.device)
    result = torch.einsum("ku,oiuv,lv->iokl", taps, weight.double(), taps).to(weight.dtype)
    return result.contiguous(memory_format=torch.channels_last)


def max_decode_batch(decoder: Decoder, z: Tensor) -> int:
    """Count the maps like these that are decoded at once."""
    upsampled = sum(level.upsample is not None for level in decoder.up)
    return max(MAX_DECODE_CELLS // (z.shape[2] * z.shape[3] * 4**upsampled), 1)


class GPUDecoder:
    """Runs the weights of a `Decoder`, of which only the layout changes.

    The bias of an upsampling convolution is pending: the next block adds it.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.taps = taps(decoder.conv_out)
        decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        flatten_parameters([decoder])
        levels: Any = reversed(decoder.up)
        self.upsample_weights: dict[Level, Tensor] = {}
        self.end_bias: dict[ResidualBlock, Tensor] = {}  # per channel, added to a block's sum
        for block in (decoder.mid.block_1, decoder.mid.block_2):
            self.end_bias[block] = _pending_bias(block, None)
        pending: Tensor | None = None
        for level in levels:
            for i, block in enumerate(level.block):
                self.end_bias[block] = _pending_bias(block, None if i else pending)
            pending = None
            if level.upsample is not None:
                conv = level.upsample.conv
                self.upsample_weights[level], pending = upsample_conv_weight(conv.weight), conv.bias

    def __call__(self, z: Tensor) -> Tensor:
        tf32 = torch.backends.cudnn.allow_tf32
        batch = max_decode_batch(self.decoder, z)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
            made = [self.run(part) for part in z.split(batch)]
        return made[0] if len(made) == 1 else torch.cat(made)

    def run(self, z: Tensor) -> Tensor:
        d: Any = self.decoder
        pending = None
        x, sums = self.block(d.mid.block_1, d.conv_in(z.contiguous(memory_format=torch.channels_last)), None, None)
        if d.mid.attn_1 is not None:
            x, sums = d.mid.attn_1(x), None
        x, sums = self.block(d.mid.block_2, x, None, sums)
        for level in reversed(d.up):
            for i, block in enumerate(level.block):
                held = [x]
                del x  # the block alone decides how long its input stays
                x, sums = self.block(block, held.pop(), None if i else pending, sums)
                if len(level.attn):
                    x, sums = level.attn[i](x), None
            if level.upsample is not None:
                x, sums = F.conv_transpose2d(x, self.upsample_weights[level], stride=2, padding=1), None
                pending = level.upsample.conv.bias
        return F.pixel_shuffle(norm_and_conv(x, d.norm_out, d.conv_out, self.taps, sums), d.fold)

    def block(
        self, block: ResidualBlock, x: Tensor, pending: Tensor | None, sums: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a block: its output, and what the next norm needs of it; `sums` is that of its input, if it is known."""
        # Maps are large: what nobody reads any more is overwritten.
        short = block.nin_shortcut
        kept = x if short is None else F.conv2d(x, short.weight)
        normed = group_norm(
            x, pending, block.norm1, inplace=short is not None, sums=sums, input_format=input_format(block.conv1)
        )
        assert block.conv1.bias is not None
        h, sums, pending = convolve(normed, block.conv1, block.conv1.bias, block.norm2.num_groups)
        del x, normed
        h = group_norm(h, pending, block.norm2, inplace=True, sums=sums, input_format=input_format(block.conv2))
        return convolve(h, block.conv2, self.end_bias[block], block.norm1.num_groups, kept)[:2]


def _pending_bias(block: ResidualBlock, pending: Tensor | None) -> Tensor:
    """Add up the biases of a block that no convolution adds; a pending one passes through the shortcut."""
    bias, short = block.conv2.bias, block.nin_shortcut
    assert bias is not None
    total = bias.double()
    if short is not None:
        assert short.bias is not None
        total = total + short.bias.double()
        pending = None if pending is None else short.weight[:, :, 0, 0].double() @ pending.double()
    return (total if pending is None else total + pending.double()).to(bias.dtype)


class FastDecode:
    """Decodes with the `GPUDecoder` of a tokenizer, which is made once."""

    def __init__(self) -> None:
        self.decoder: GPUDecoder | None = None

    def __call__(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        if self.decoder is None or self.decoder.decoder is not tokenizer.decoder:
            self.decoder = GPUDecoder(tokenizer.decoder)
        return tokenizer.decode(features, self.decoder)
