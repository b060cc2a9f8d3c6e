"""Entropy of the bits that the head would predict from a state between two layers: norm, head and entropy at once.

With the norm written out, the difference of a bit's two logits is z = (x . A - mean(x) a) / deviation(x) + c, where
A, a and c hold the head's weights and the condition's scale and shift. So one pass over x is enough.

Less than one is enough where a layer pruned most tokens: these received an enlarged map of the scale before, and the
products of an enlarged map are the enlarged products of the map; or they received nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nextscale.kernels import dispatch
from nextscale.kernels.triton.logit_lens import fused_head, fused_logit_lens
from nextscale.kernels.triton.restored_logit_lens import fused_restored_logit_lens

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
        if dispatch.enabled(head.weight) and head.weight.dtype == scale.dtype == torch.float32:
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


class RestoredState(NamedTuple):
    """A state whose pruned tokens were restored in place."""

    x: Tensor  # [R, N, C]
    chosen: Packed  # all other tokens were pruned
    cached: Tensor | None = None  # what these received, [R, n, C], on the first grid; None: they kept their input
    grids: tuple[Grid, Grid] = ((0, 0), (0, 0))
    mode: str = "nearest"


class BitStats(NamedTuple):
    """What is known of the conditional rows of a state."""

    entropy: Tensor  # [B, N]
    products: Tensor  # x . A, [B, N, d]
    moments: Tensor  # mean and variance of x, [B, N, 2]


class LogitLens:
    """The entropies of a scale's states, layer after layer."""

    def __init__(self, images: int, head: Callable[[], BitHead]) -> None:
        self.images, self.head = images, head
        self.state: Tensor | None = None  # the latest one,
        self.stats: BitStats | None = None  # its statistics,
        self.restored: RestoredState | None = None  # and what became of it since

    def entropy(self, x: Tensor, unit: str) -> Tensor:
        """[B, N] of the conditional rows of x [R, N, C]; valid until the next call."""
        restored, self.restored, self.state = self.restored, None, x
        if restored is not None and self.stats is not None and same(restored.x, x):
            fused_restored_logit_lens(restored, self.stats, self.head(), unit)
        else:
            self.stats = BitStats(*fused_logit_lens(x[: self.images], self.head(), unit))
        return self.stats.entropy

    def moments(self, x: Tensor, chosen: Selection) -> Tensor | None:
        """Where to leave the moments [B, N, 2] of all tokens that change while x is restored, if the next call of
        `entropy` can do without a full pass then. The caller sets `restored`."""
        state, self.state, self.restored = self.state, None, None  # the state is gone in any case
        if state is None or self.stats is None or not same(state, x) or chosen.as_packed is None:
            return None
        return self.stats.moments

    def forget(self) -> None:
        """Let go of the scale's states."""
        self.state = self.stats = self.restored = None


def same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def supports(x: Tensor) -> bool:
    """Whether the kernel takes states like these."""
    return dispatch.enabled(x) and x.dtype == torch.float32 and x.shape[-1] % 64 == 0
