"""The decoder of GPU runtimes computes what the plain one computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nextscale.runtime.decoder import GPUDecoder, upsample_conv_weight
from nextscale.tokenizers.autoencoder import Decoder, Upsample


def test_upsampling_is_a_transposed_convolution() -> None:
    torch.manual_seed(0)
    upsample = Upsample(6)
    x = torch.randn(2, 6, 5, 7)
    found = F.conv_transpose2d(x, upsample_conv_weight(upsample.conv.weight), upsample.conv.bias, stride=2, padding=1)
    assert torch.allclose(found, upsample(x), atol=1e-5)


@pytest.mark.parametrize("attention", [False, True])
def test_gpu_decoder(attention: bool, monkeypatch) -> None:
    torch.manual_seed(0)
    decoder = Decoder(32, (1, 2, 2, 4), 4, 1, attention).requires_grad_(False)
    for module in decoder.modules():  # biases and norms that do something
        if isinstance(module, (nn.GroupNorm, nn.Conv2d)):
            nn.init.normal_(module.bias)
    z = torch.randn(2, 4, 6, 5)
    expected = decoder(z)
    for at_once in (1, 2**20):  # one by one, or both
        monkeypatch.setattr("nextscale.runtime.decoder.MAX_DECODE_CELLS", at_once)
        assert torch.allclose(GPUDecoder(decoder)(z), expected, atol=1e-4 * expected.abs().max())
