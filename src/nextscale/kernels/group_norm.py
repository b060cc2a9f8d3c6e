"""Group norm with SiLU behind it, and the residual sum of a decoder's block, for maps with channels last.

Both take an offset per channel: the bias of the convolution before, which then needs no pass over the map of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels import dispatch
from nextscale.kernels.fp8 import InputFormat
from nextscale.kernels.triton.group_norm import fused_add, fused_norm


def group_norm(
    x: Tensor,
    offset: Tensor | None,
    norm: nn.GroupNorm,
    silu: bool = True,
    inplace: bool = False,
    sums: Tensor | None = None,
    input_format: InputFormat | None = None,
) -> Tensor:
    """Norm x + offset, [B, C, H, W], perhaps in the input format of the layer behind it. `inplace`: x may be
    overwritten. `sums`: those that came with x."""
    if supports(x):
        return fused_norm(x, offset, norm, silu, inplace, sums, input_format or InputFormat(x.dtype))
    y = norm(x if offset is None else x + offset[:, None, None])
    return F.silu(y) if silu else y


def add(x: Tensor, h: Tensor, offset: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
    """x + h + offset, written over h; and its sums for a norm of so many groups, if they cost nothing now."""
    if supports(h):
        return fused_add(x, h, offset, groups)
    return h.add_(x).add_(offset[:, None, None]), None


def supports(x: Tensor) -> bool:
    channels = x.shape[1]
    known = x.dtype in dispatch.HALF and channels >= 32 and channels & (channels - 1) == 0
    return dispatch.enabled(x) and known and x.is_contiguous(memory_format=torch.channels_last)
