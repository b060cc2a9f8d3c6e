"""3 x 3 convolutions in the residual blocks of a decoder, for maps with channels last.

Those in 8 bits have a kernel: torch has none. Bias, the sum at the end of a block and the sums that the next norm asks
for are made while a result is at hand, so that nobody has to read the largest maps of a run for them. In 16 bits such a
kernel takes as long in a run as cuDNN and these passes together, so there cuDNN stays.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels import group_norm
from nextscale.kernels.fp8 import FORMAT, FP8Conv

try:
    from nextscale.kernels.triton.conv import CHANNELS, fused_conv
except ImportError:  # a CPU build of torch comes without Triton
    fused_conv, CHANNELS = None, 128  # type: ignore[assignment]

LAST = torch.channels_last
OLDEST = (9, 0)  # of the GPUs that fetch tiles by themselves


def convolve(
    x: Tensor, conv: nn.Conv2d | FP8Conv, term: Tensor, groups: int, kept: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The convolution of x [B, C, H, W] without its bias, plus `term` [outputs] and the map `kept`; what a norm of so
    many groups needs of it, if that costs nothing now; and the term, if somebody else has to add it."""
    if isinstance(conv, FP8Conv):
        if runs_on(x, len(conv.weight)) and (kept is None or kept.is_contiguous(memory_format=LAST)):
            return *fused_conv(x, conv, term, groups, kept), None
        h = conv.product(x)
    else:
        h = F.conv2d(x, conv.weight, padding=1)
    return (h, None, term) if kept is None else (*group_norm.join(kept, h, term, groups), None)


def runs_on(x: Tensor, outputs: int) -> bool:
    channels, height, width = x.shape[1:]
    fits = x.dtype == FORMAT and x.is_contiguous(memory_format=LAST) and height * width * outputs < 2**31
    return fits and _known(channels, outputs) and new_enough(x.device)


def takes(conv: nn.Conv2d) -> bool:
    """Whether the kernel runs such a convolution on a GPU that is new enough."""
    return _known(conv.in_channels, conv.out_channels) and conv.kernel_size == (3, 3)


def _known(channels: int, outputs: int) -> bool:
    """A program takes so many outputs, and the norms in front of it and behind it ask for powers of two."""
    return all(n >= CHANNELS and n & (n - 1) == 0 for n in (channels, outputs))


@functools.cache
def new_enough(device: torch.device) -> bool:
    return fused_conv is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST
