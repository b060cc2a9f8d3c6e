"""The end of a decoder: group norm, SiLU and a convolution to a few channels.

Such a convolution is nine thin matrix products. They are made together, while the norm is applied, and the nine results
are shifted and added in a second, small pass; so the large map is read once and never written.
"""

from __future__ import annotations

from torch import Tensor, nn

from nextscale.kernels.group_norm import group_norm, runs_on

try:
    from nextscale.kernels.triton.conv_out import fused_norm_and_conv
except ImportError:  # a CPU build of torch comes without Triton
    fused_norm_and_conv = None  # type: ignore[assignment]

MOST = 32  # taps times channels that the convolution gives


def taps(conv: nn.Conv2d) -> Tensor:
    """The weights of a 3 x 3 convolution as one matrix [C, 9 x outputs]."""
    return conv.weight.detach().permute(1, 2, 3, 0).flatten(1).contiguous()


def norm_and_conv(x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d, taps: Tensor, sums: Tensor | None = None) -> Tensor:
    """Of x [B, C, H, W], which may be written over; `sums`: what `join` gave with it."""
    if fused_norm_and_conv is not None and runs_on(x) and taps.shape[1] <= MOST and conv.kernel_size == (3, 3):
        return fused_norm_and_conv(x, norm, conv, taps, sums)
    return conv(group_norm(x, None, norm, inplace=True, sums=sums))
