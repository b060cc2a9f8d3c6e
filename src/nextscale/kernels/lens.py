"""Entropy of the bits that the head would predict from a state between two layers: norm, head and entropy at once.

With the norm written out, the difference of a bit's two logits is z = (x . A - mean(x) a) / deviation(x) + c, where
A, a and c hold the head's weights and the condition's scale and shift. So one pass over x is enough.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

try:
    from nextscale.kernels.lens_triton import fused_lens
except ImportError:  # a CPU build of torch comes without Triton
    fused_lens = None  # type: ignore[assignment]


class BitHead(NamedTuple):
    """A head of bits behind a norm that the condition modulates, for every image."""

    factor: Tensor  # A, [B, C, d]
    total: Tensor  # a, its sum over channels, [B, d]
    term: Tensor  # c, [B, d]
    eps: float

    @classmethod
    def of(cls, head: nn.Linear, scale: Tensor, shift: Tensor, eps: float) -> BitHead:
        """`head` gives [d, 2] logits; scale and shift are [B, C]."""
        weight = head.weight.unflatten(0, (-1, 2)).diff(dim=1)[:, 0].t()  # [C, d]
        factor = (1 + scale)[..., None] * weight
        term = shift @ weight + head.bias.unflatten(0, (-1, 2)).diff(dim=1)[:, 0]
        return cls(factor.contiguous(), factor.sum(1), term, eps)

    def logits(self, x: Tensor) -> Tensor:
        """The reference: z [B, N, d] of x [B, N, C]."""
        mean = x.mean(-1, keepdim=True)
        deviation = (x.var(-1, keepdim=True, unbiased=False) + self.eps).sqrt()
        return (x @ self.factor - mean * self.total[:, None]) / deviation + self.term[:, None]


def looks(x: Tensor) -> bool:
    """Whether the kernel takes states like these."""
    return fused_lens is not None and x.is_cuda and x.dtype == torch.float32 and x.shape[-1] % 64 == 0
