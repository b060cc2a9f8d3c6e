"""The end of a decoder: group norm, SiLU and a convolution to a few channels.

Such a convolution is nine thin matrix products. They are made together, while the norm is applied, and a second, small
pass shifts and adds the nine results; so the large map is read once and never written.
"""

from __future__ import annotations

from torch import Tensor, nn

from nextscale.kernels import group_norm
from nextscale.kernels.triton.conv_out import fused_norm_and_conv

MAX_COLUMNS = 32  # 9 taps times output channels


def taps(conv: nn.Conv2d) -> Tensor:
    """The weights of a 3 x 3 convolution as one matrix [C, 9 x outputs]."""
    return conv.weight.detach().permute(1, 2, 3, 0).flatten(1).contiguous()


def norm_and_conv(x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d, taps: Tensor, sums: Tensor | None = None) -> Tensor:
    """Norm, activate and convolve x [B, C, H, W], which may be overwritten; `sums` are those that came with x."""
    if supports(x, conv, taps):
        return fused_norm_and_conv(x, norm, conv, taps, sums)
    return conv(group_norm.group_norm(x, None, norm, inplace=True, sums=sums))


def supports(x: Tensor, conv: nn.Conv2d, taps: Tensor) -> bool:
    return group_norm.supports(x) and taps.shape[1] <= MAX_COLUMNS and conv.kernel_size == (3, 3)
