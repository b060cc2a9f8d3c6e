"""One program copies all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def fused_carry(to: Tensor, source: Tensor) -> None:
    with torch.cuda.device(to.device if to.is_cuda else source.device):
        _carry[(1,)](to, source, to.numel(), BLOCK=triton.next_power_of_2(to.numel()), num_warps=1)


@triton.jit(do_not_specialize=["count"])
def _carry(to_at, source_at, count, BLOCK: tl.constexpr):
    number = tl.arange(0, BLOCK)
    tl.store(to_at + number, tl.load(source_at + number, mask=number < count), mask=number < count)
