"""3 x 3 convolutions in the residual blocks of a decoder, for maps with channels last.

Those in FP8 (e4m3) have a kernel: torch has none. Bias, the residual sum of a block and the sums that the next norm
needs are made before a result is written, so that no further pass reads the largest maps of a run. In 16 bits such a
kernel takes as long in a run as cuDNN and these passes together, so there cuDNN stays.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels import dispatch, group_norm
from nextscale.kernels.fp8 import FP8_DTYPE, FP8Conv
from nextscale.kernels.triton.conv import CHANNELS, fused_conv


def convolve(
    x: Tensor, conv: nn.Conv2d | FP8Conv, bias: Tensor, groups: int, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Convolve x [B, C, H, W], and add `bias` [outputs], which replaces the layer's own, and the map `residual`.

    Returns the result, the sums of it that a norm of so many groups needs, if they cost nothing now, and the bias if it
    is still to be added.
    """
    if isinstance(conv, FP8Conv):
        if supports(conv, x.device) and _fits(x, conv, residual):
            return *fused_conv(x, conv, bias, groups, residual), None
        h = conv.product(x)
    else:
        h = F.conv2d(x, conv.weight, padding=1)
    return (h, None, bias) if residual is None else (*group_norm.add(residual, h, bias, groups), None)


def supports(conv: nn.Conv2d | FP8Conv, device: torch.device) -> bool:
    """Whether the kernel runs such a convolution in FP8 on this device. The norms around it ask for powers of two."""
    outputs, channels, *size = conv.weight.shape
    fits = size == [3, 3] and all(n >= CHANNELS and n & (n - 1) == 0 for n in (channels, outputs))
    return dispatch.enabled_on(device) and fits and dispatch.has_tma(device)


def _fits(x: Tensor, conv: FP8Conv, residual: Tensor | None) -> bool:
    if x.dtype != FP8_DTYPE or x.shape[2] * x.shape[3] * len(conv.weight) >= 2**31:
        return False
    return all(t is None or t.is_contiguous(memory_format=torch.channels_last) for t in (x, residual))
