"""Copies of a few numbers from the host's pinned memory to a device, or back.

A kernel reads and writes that memory itself: to start a copy engine between two kernels takes longer than to copy.
"""

from __future__ import annotations

from torch import Tensor

from nextscale.kernels import dispatch
from nextscale.kernels.triton.pinned_copy import fused_copy

MAX_NUMBERS = 8192


def copy_pinned(to: Tensor, source: Tensor) -> None:
    """Copy without waiting: on a GPU the numbers arrive in the order of its stream. Shapes and dtypes are equal."""
    if supports(to, source):
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert to.dtype == source.dtype
        fused_copy(to, source)
    else:
        to.copy_(source, non_blocking=True)


def supports(to: Tensor, source: Tensor) -> bool:
    host, device = (source, to) if to.is_cuda else (to, source)
    return dispatch.enabled(device) and device.is_cuda and host.is_pinned() and to.numel() <= MAX_NUMBERS
