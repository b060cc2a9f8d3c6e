"""A few numbers from the host's pinned memory to a device, or back.

A kernel reads and writes that memory itself: to start a copy engine between two kernels takes longer than to copy.
"""

from __future__ import annotations

from torch import Tensor

try:
    from nextscale.kernels.triton.pinned_copy import fused_carry
except ImportError:  # a CPU build of torch comes without Triton
    fused_carry = None  # type: ignore[assignment]

MOST = 8192  # numbers


def copy_pinned(to: Tensor, source: Tensor) -> None:
    """Both of one shape and dtype, without waiting: on a GPU they are there when the device has come so far."""
    here, there = (source, to) if to.is_cuda else (to, source)
    if fused_carry is not None and there.is_cuda and here.is_pinned() and to.numel() <= MOST:
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert to.dtype == source.dtype
        fused_carry(to, source)
    else:
        to.copy_(source, non_blocking=True)
