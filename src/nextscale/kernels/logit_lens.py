"""Entropy of the bits that the head would predict from a state between two layers: norm, head and entropy at once.

With the norm written out, the difference of a bit's two logits is z = (x . A - mean(x) a) / deviation(x) + c, where
A, a and c hold the head's weights and the condition's scale and shift. So one pass over x is enough.

And less than one is, where a layer left most tokens out: what these received is an enlarged map of the scale before,
and the products of an enlarged map are the enlarged products of the map; or they received nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

try:
    from nextscale.kernels.triton.logit_lens import fused_head, fused_lens
    from nextscale.kernels.triton.restored_logit_lens import fused_lens_of_filled
except ImportError:  # a CPU build of torch comes without Triton
    fused_head = fused_lens = fused_lens_of_filled = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from nextscale.engine.schedule import Grid
    from nextscale.methods.selection import Packed, Selection


class BitHead(NamedTuple):
    """A head of bits behind a norm that the condition modulates, for every image."""

    factor: Tensor  # A, [B, C, d]
    total: Tensor  # a, its sum over channels, [B, d]
    term: Tensor  # c, [B, d]
    eps: float

    @classmethod
    def of(cls, head: nn.Linear, scale: Tensor, shift: Tensor, eps: float) -> BitHead:
        """`head` gives [d, 2] logits; scale and shift are [B, C]."""
        if fused_head is not None and head.weight.is_cuda and head.weight.dtype == scale.dtype == torch.float32:
            return cls(*fused_head(head.weight, head.bias, scale, shift), eps)
        weight = head.weight.unflatten(0, (-1, 2)).diff(dim=1)[:, 0].t()  # [C, d]
        factor = (1 + scale)[..., None] * weight
        term = shift @ weight + head.bias.unflatten(0, (-1, 2)).diff(dim=1)[:, 0]
        return cls(factor.contiguous(), factor.sum(1), term, eps)

    def logits(self, x: Tensor) -> Tensor:
        """The reference: z [B, N, d] of x [B, N, C]."""
        mean = x.mean(-1, keepdim=True)
        deviation = (x.var(-1, keepdim=True, unbiased=False) + self.eps).sqrt()
        return (x @ self.factor - mean * self.total[:, None]) / deviation + self.term[:, None]


class Filled(NamedTuple):
    """A state whose holes were filled in place."""

    x: Tensor  # [R, N, C]
    chosen: Packed  # all other tokens are holes
    cached: Tensor | None = None  # what holes received, [R, n, C], on the first grid; None: they stayed as they were
    grids: tuple[Grid, Grid] = ((0, 0), (0, 0))
    mode: str = "nearest"


class Look(NamedTuple):
    """What was seen of the conditional rows of a state."""

    entropy: Tensor  # [B, N]
    products: Tensor  # x . A, [B, N, d]
    moments: Tensor  # mean and variance of x, [B, N, 2]


class LogitLens:
    """The entropies of a scale's states, layer after layer."""

    def __init__(self, images: int, head: Callable[[], BitHead]) -> None:
        self.images, self.head = images, head
        self.seen: Tensor | None = None  # the state that was looked at last
        self.look: Look | None = None  # and what was seen of it
        self.filled: Filled | None = None  # what became of it since

    def entropy(self, x: Tensor, unit: str) -> Tensor:
        """[B, N] of the conditional rows of x [R, N, C]; holds until the next look."""
        filled, self.filled, self.seen = self.filled, None, x
        if filled is not None and self.look is not None and same(filled.x, x):
            fused_lens_of_filled(filled, self.look, self.head(), unit)
        else:
            self.look = Look(*fused_lens(x[: self.images], self.head(), unit))
        return self.look.entropy

    def moments(self, x: Tensor, chosen: Selection) -> Tensor | None:
        """Where whoever fills holes of x has to leave the moments [B, N, 2] of what changes, if that spares a look at
        all of it. Then `filled` has to be set."""
        seen, self.seen, self.filled = self.seen, None, None  # what was seen is gone in any case
        if seen is None or self.look is None or not same(seen, x) or chosen.as_packed is None:
            return None
        return self.look.moments

    def forget(self) -> None:
        """The scale is over."""
        self.seen = self.look = self.filled = None


def same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def looks(x: Tensor) -> bool:
    """Whether the kernel takes states like these."""
    return fused_lens is not None and x.is_cuda and x.dtype == torch.float32 and x.shape[-1] % 64 == 0
