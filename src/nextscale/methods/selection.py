"""Choosing, taking and putting back tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nextscale.kernels.select import fused_select, selects


@dataclass(frozen=True)
class Selection:
    """The tokens that go through a layer. Slots at or behind `count` are padding."""

    index: Tensor  # [R, K] cells in raster order
    count: Tensor  # [R]
    slot: Tensor | None = None  # the slot of every cell [R, N], -1 where it was not chosen, if anybody knows

    def repeated(self, copies: int) -> Selection:
        """The same for as many rows again, and again."""
        if copies == 1:
            return self
        slot = None if self.slot is None else self.slot.repeat(copies, 1)
        return Selection(self.index.repeat(copies, 1), self.count.repeat(copies), slot)

    @property
    def real(self) -> Tensor:
        """[R, K], False at padding."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.count[:, None]

    def of(self, x: Tensor) -> Tensor:
        """The chosen tokens of x [R or 1, N, ...] -> [R, K, ...]."""
        index = self.index.view(*self.index.shape, *(1,) * (x.ndim - 2))
        source = x.expand(len(self.index), *x.shape[1:])
        return source.gather(1, index.expand(-1, -1, *x.shape[2:]))

    def behind(self, context: int) -> Selection:
        """All of the first `context` tokens, and behind them the chosen ones."""
        if not context:
            return self
        first = torch.arange(context, device=self.index.device).expand(len(self.index), -1)
        return Selection(torch.cat((first, self.index + context), dim=1), self.count + context)

    def mask(self, tokens: int) -> Tensor:
        """[R, tokens], True where a cell was chosen."""
        slots = self.index.where(self.real, tokens)
        return torch.zeros(len(slots), tokens + 1, dtype=torch.bool, device=slots.device).scatter(1, slots, True)[
            :, :-1
        ]


def keep_highest(score: Tensor, count: Tensor, capacity: int | None = None) -> Selection:
    """The `count` [R] cells of highest score [R, N]; of equal scores the earlier cell.

    `capacity` fixes the number of slots, and no more cells than that stay; None takes the largest count, which the
    host has to wait for.
    """
    n = score.shape[1]
    slots = int(count.max()) if capacity is None else capacity
    if selects(score):
        return Selection(*fused_select(score, count, slots))
    # A stable sort, not topk: which of two equal scores stays must not depend on the batch or the device.
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :slots]
    padding = torch.arange(slots, device=score.device) >= count[:, None]
    raster = order.masked_fill(padding, n).sort(dim=1).values
    return Selection(raster.clamp_max(n - 1), count.clamp_max(slots))


def gather(x: Tensor, chosen: Selection | None) -> Tensor:
    """The chosen tokens of x [R or 1, N, ...] -> [R, K, ...]."""
    return x if chosen is None else chosen.of(x)


def scatter(x: Tensor, chosen: Selection, y: Tensor) -> Tensor:
    """x with the chosen tokens replaced by y [R, K, C]; padding goes nowhere."""
    # Padding is sent to an extra cell behind the map, so that it can never collide with a real token.
    index = chosen.index.where(chosen.real, x.shape[1])[..., None].expand_as(y)
    extra = x.new_zeros(len(x), 1, x.shape[2])
    return torch.cat((x, extra), dim=1).scatter(1, index, y.to(x.dtype))[:, :-1]
