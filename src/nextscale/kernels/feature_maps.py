"""Codes into a map and out of it: folding, bilinear resizing and the sum in one pass. `BSQTokenizer` has the
references."""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.kernels import dispatch
from nextscale.kernels.triton.feature_maps import fused_add, fused_inputs


def supports(features: Tensor) -> bool:
    """Whether the kernels take maps [B, d, H, W] like these."""
    known = dispatch.enabled(features) and features.dtype == torch.float32 and features.is_contiguous()
    return known and not torch.compiler.is_compiling()


__all__ = ["fused_add", "fused_inputs", "supports"]
