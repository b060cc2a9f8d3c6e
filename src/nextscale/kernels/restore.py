"""Filling the holes of a layer's output in one pass instead of ten; the reference is `CachedPolicy._restored`."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from nextscale.kernels.restore_triton import fused_restore
except ImportError:  # a CPU build of torch comes without Triton
    fused_restore = None  # type: ignore[assignment]


def restores(x: Tensor, mode: str) -> bool:
    """Whether the kernel takes maps [R, N, C] like these."""
    return fused_restore is not None and x.is_cuda and x.dtype == torch.float32 and mode in ("nearest", "bilinear")
