"""Filling the holes of a layer's output in one pass instead of ten, in place. The references are
`CachedPolicy._restored` and, where holes stay as they are, `selection.scatter`."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from nextscale.kernels.triton.restore import fused_put, fused_record, fused_restore
except ImportError:  # a CPU build of torch comes without Triton
    fused_put = fused_record = fused_restore = None  # type: ignore[assignment]

MODES = ("nearest", "bilinear")  # of enlarging that the kernel knows


def puts(x: Tensor) -> bool:
    """Whether the kernels take maps [R, N, C] like these."""
    return fused_put is not None and x.is_cuda and x.dtype == torch.float32


__all__ = ["MODES", "fused_put", "fused_record", "fused_restore", "puts"]
