"""The same decoder for a GPU: channels last, compiled, and enlarging with four ninths of the arithmetic."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.tokenizers.autoencoder import Decoder, Upsample

# Of the 3 taps of a convolution over a doubled line, those that fall on one cell: row k is tap k of the 4 taps of a
# transposed convolution of stride 2.
TAPS = ((0, 0, 1), (0, 1, 1), (1, 1, 0), (1, 0, 0))


class Doubled(nn.Module):
    """Nearest x 2 followed by 3 x 3 convolution, as one transposed convolution."""

    weight: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        taps = torch.tensor(TAPS, dtype=torch.float64, device=conv.weight.device)
        weight = torch.einsum("ku,oiuv,lv->iokl", taps, conv.weight.double(), taps).to(conv.weight.dtype)
        self.register_buffer("weight", weight.contiguous(memory_format=torch.channels_last))
        self.bias = conv.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, self.weight, self.bias, stride=2, padding=1)


@torch.no_grad()
def for_gpu(decoder: Decoder) -> Decoder:
    """A twin that shares all weights but those that enlarge; of the shared ones only the layout changes."""
    decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    twin = copy.deepcopy(decoder, memo={id(p): p for p in decoder.parameters()})
    for level in twin.up:
        if isinstance(level.upsample, Upsample):
            level.upsample = Doubled(level.upsample.conv)
    return twin
