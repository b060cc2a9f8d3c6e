"""Which cells stay: the `count` of highest score in raster order, as `topk_select` says. On a GPU without sorting."""

from __future__ import annotations

from torch import Tensor

try:
    from nextscale.kernels.triton.topk_select import MOST, fused_link_and_select, fused_select
except ImportError:  # a CPU build of torch comes without Triton
    MOST, fused_select, fused_link_and_select = 0, None, None  # type: ignore[assignment]


def selects(score: Tensor) -> bool:
    """Whether the kernel takes these scores [R, N]."""
    return fused_select is not None and score.is_cuda and score.shape[1] <= MOST


__all__ = ["fused_link_and_select", "fused_select", "selects"]
