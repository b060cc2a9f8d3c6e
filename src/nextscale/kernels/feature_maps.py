"""Codes into a map and out of it: folding, bilinear resizing and the sum in one pass, as `BSQTokenizer` says."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from nextscale.kernels.triton.feature_maps import fused_add, fused_inputs
except ImportError:  # a CPU build of torch comes without Triton
    fused_add = fused_inputs = None  # type: ignore[assignment]


def takes(features: Tensor) -> bool:
    """Whether the kernels take maps [B, d, H, W] like these."""
    known = features.dtype == torch.float32 and features.is_contiguous()
    return fused_add is not None and features.is_cuda and known and not torch.compiler.is_compiling()


__all__ = ["fused_add", "fused_inputs", "takes"]
