"""Group norm with SiLU behind it, and the sum at the end of a residual block, for maps with channels last.

Both take an offset per channel: the bias of the convolution before, which then needs no pass over the map of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels.fp8 import Reads

try:
    from nextscale.kernels.triton.group_norm import fused_join, fused_norm
except ImportError:  # a CPU build of torch comes without Triton
    fused_norm = fused_join = None  # type: ignore[assignment]


def group_norm(
    x: Tensor,
    offset: Tensor | None,
    norm: nn.GroupNorm,
    silu: bool = True,
    inplace: bool = False,
    sums: Tensor | None = None,
    reads: Reads | None = None,
) -> Tensor:
    """Of x + offset, [B, C, H, W]; `inplace`: nobody needs x any more; `sums`: what came with x.
    It may already be as the layer behind `reads` it."""
    if runs_on(x):
        return fused_norm(x, offset, norm, silu, inplace, sums, reads or Reads(x.dtype))
    y = norm(x if offset is None else x + offset[:, None, None])
    return F.silu(y) if silu else y


def join(x: Tensor, h: Tensor, offset: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
    """x + h + offset, in the place of h; and what a norm of so many groups needs of it, if that costs nothing now."""
    if runs_on(h):
        return fused_join(x, h, offset, groups)
    return h.add_(x).add_(offset[:, None, None]), None


def runs_on(x: Tensor) -> bool:
    channels = x.shape[1]
    known = x.dtype in (torch.bfloat16, torch.float16) and channels >= 32 and channels & (channels - 1) == 0
    return fused_norm is not None and x.is_cuda and known and x.is_contiguous(memory_format=torch.channels_last)
