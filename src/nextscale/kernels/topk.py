"""Cells of highest score in raster order, without sorting. The reference is `selection.topk_select`."""

from __future__ import annotations

from torch import Tensor

from nextscale.kernels import dispatch
from nextscale.kernels.triton.topk import MAX_CELLS, fused_link_and_select, fused_select


def supports(score: Tensor) -> bool:
    """Whether the kernel takes these scores [R, N]."""
    return dispatch.enabled(score) and score.shape[1] <= MAX_CELLS


__all__ = ["fused_link_and_select", "fused_select", "supports"]
