"""Restoring the pruned tokens of a layer's output in place, in one pass instead of ten. The references are
`CachedPolicy._restored` and, where pruned tokens keep their input, `selection.scatter`."""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.kernels import dispatch
from nextscale.kernels.triton.restore import fused_record, fused_restore, fused_scatter

MODES = ("nearest", "bilinear")  # of interpolation that the kernel knows


def supports(x: Tensor) -> bool:
    """Whether the kernels take maps [R, N, C] like these."""
    return dispatch.enabled(x) and x.dtype == torch.float32


__all__ = ["MODES", "fused_record", "fused_restore", "fused_scatter", "supports"]
