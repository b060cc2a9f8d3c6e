"""Choosing, taking and putting back tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels import topk

if TYPE_CHECKING:
    from nextscale.engine.rows import Rows


@dataclass(frozen=True)
class Selection:
    """The tokens that go through a layer. Slots at or behind `count` are padding."""

    index: Tensor  # [R, K] cells in raster order
    count: Tensor  # [R]

    def repeated(self, copies: int) -> Selection:
        """The same for as many rows again, and again."""
        if copies == 1:
            return self
        return Selection(self.index.repeat(copies, 1), self.count.repeat(copies))

    def first(self, rows: int) -> Selection:
        """Of the first rows alone."""
        return Selection(self.index[:rows], self.count[:rows])

    def only(self, rows: Tensor) -> Selection:
        """Without those of the rows that are False in [R]."""
        return Selection(self.index, self.count * rows)

    def expand_to_rows(self, rows: Rows) -> Selection:
        """That of every image, for all its rows."""
        return Selection(rows.expand_to_rows(self.index), rows.expand_to_rows(self.count))

    @property
    def as_packed(self) -> Packed | None:
        """The selection itself, if its tokens lie packed."""
        return None

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


class Packed(Selection):
    """A selection whose tokens lie one behind the other, those of a row behind those of the row before: [1, T, ...].

    Neither rows nor layers pad each other. How many they are is the device's business: kernels read it there, and what
    lies behind the last token is nobody's.
    """

    def __init__(self, cell: Tensor, start: Tensor, slot: Tensor, counts: tuple[int, ...] | None = None) -> None:
        """`counts` of every row, if the host knows them."""
        set_ = functools.partial(object.__setattr__, self)
        set_("cell", cell)  # [T] int32: row * N + cell of every token, in raster order
        set_("start", start)  # [R + 1] int32: where the tokens of a row begin; at last, where all end
        set_("slot", slot)  # [R, N] int32: where the token of a cell lies; -1 where it was not chosen
        set_("counts", counts)

    cell: Tensor
    start: Tensor
    slot: Tensor
    counts: tuple[int, ...] | None

    @classmethod
    def of_mask(cls, mask: Tensor) -> Packed:
        """The cells that are True in [R, N]."""
        chosen = mask.flatten()
        buffer = chosen.cumsum(0, dtype=torch.int32) - 1
        last = chosen.numel()
        where = torch.arange(last, dtype=torch.int32, device=mask.device)
        cell = where.new_zeros(last + 1).scatter(0, buffer.where(chosen, last).long(), where)[:-1]
        ends = buffer.view(mask.shape)[:, -1] + 1
        return cls(cell, torch.cat((ends.new_zeros(1), ends)), buffer.where(chosen, -1).view(mask.shape))

    @property
    def as_packed(self) -> Packed:
        return self

    @functools.cached_property
    def count(self) -> Tensor:
        return self.start.diff().long()

    @functools.cached_property
    def index(self) -> Tensor:
        """[R, most]."""
        tokens = self.slot.shape[1]
        cell = self.cell.long().clamp(0, self.slot.numel() - 1) % tokens
        return self.padded(cell[None]).where(self._real, tokens - 1)

    @property
    def most(self) -> int:
        """Tokens that a row may have."""
        return self.slot.shape[1] if self.counts is None else max(self.counts)

    @functools.cached_property
    def row(self) -> Tensor:
        """Of every token, [T]; behind the last one, any."""
        return (self.cell // self.slot.shape[1]).clamp(0, len(self.slot) - 1)

    @property
    def _real(self) -> Tensor:
        return torch.arange(self.most, device=self.slot.device) < self.count[:, None]

    def taken(self, x: Tensor) -> Tensor:
        """The chosen tokens of x [R, N, ...] -> [1, T, ...]; behind the last one, any."""
        return x.flatten(0, 1)[self.cell.long().clamp(0, self.slot.numel() - 1)][None]

    def padded(self, x: Tensor) -> Tensor:
        """Tokens [1, T, ...] -> [R, most, ...]; padding is some token."""
        buffer = self.start[:-1, None] + torch.arange(self.most, dtype=torch.int32, device=x.device)
        return x[0][buffer.clamp_max(max(x.shape[1] - 1, 0)).long()]

    def packed(self, x: Tensor) -> Tensor:
        """Tokens [R, most, ...] -> [1, T, ...]."""
        row = self.row.long()
        rank = torch.arange(len(row), device=x.device) - self.start[row]
        return x[row, rank.clamp(0, x.shape[1] - 1)][None]

    @property
    def plain(self) -> Selection:
        """The same, padded."""
        return Selection(self.index, self.count)

    def known(self) -> Packed:
        """With counts that the host knows: it waits for them."""
        counts = tuple(self.count.tolist())
        return Packed(self.cell[: sum(counts)], self.start, self.slot, counts)

    def first(self, rows: int) -> Packed:
        """Of the first rows alone; the tokens stay where they are."""
        counts = None if self.counts is None else self.counts[:rows]
        return Packed(self.cell, self.start[: rows + 1], self.slot[:rows], counts)

    def only(self, rows: Tensor) -> Packed:
        return Packed.of_mask((self.slot >= 0) & rows[:, None])

    def expand_to_rows(self, rows: Rows) -> Packed:
        return Packed.of_mask(rows.expand_to_rows(self.slot >= 0))

    def repeated(self, copies: int) -> Packed:
        if copies == 1:
            return self
        found = Packed.of_mask((self.slot >= 0).repeat(copies, 1))
        if self.counts is None:
            return found
        counts = self.counts * copies
        return Packed(found.cell[: sum(counts)], found.start, found.slot, counts)

    def behind(self, context: int) -> Packed:
        if not context:
            return self
        all_of = self.slot.new_ones(len(self.slot), context, dtype=torch.bool)
        found = Packed.of_mask(torch.cat((all_of, self.slot >= 0), dim=1))
        return found if self.counts is None else found.known()

    def mask(self, tokens: int) -> Tensor:
        return self.slot >= 0


def topk_select(score: Tensor, count: Tensor, copies: int = 1) -> Selection:
    """The `count` [B] cells of highest score [B, N], of equal scores the earlier cell; for `copies` times the rows.

    Kernels leave them packed, and nobody waits for the counts. Elsewhere the host does.
    """
    if topk.supports(score):
        return Packed(*topk.fused_select(score, count, copies))
    n, slots = score.shape[1], int(count.max())
    # A stable sort, not topk: which of two equal scores stays must not depend on the batch or the device.
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :slots]
    padding = torch.arange(slots, device=score.device) >= count[:, None]
    raster = order.masked_fill(padding, n).sort(dim=1).values
    return Selection(raster.clamp_max(n - 1), count).repeated(copies)


def for_rows(rows: Rows, keep: Callable[..., Selection]) -> Selection:
    """What `keep(copies=n)` keeps of every image, for all rows of the images at work."""
    if not rows.unconditional or rows.unconditional == rows.image_ids:
        return keep(copies=2 if rows.unconditional else 1)
    return keep(copies=1).expand_to_rows(rows)


def every_token(x: Tensor, rows: Tensor) -> Selection:
    """Of x [R, N, C], in the rows that are True in [R]."""
    index = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    return Selection(index, torch.full((len(x),), x.shape[1], device=x.device)).only(rows)


def gather(x: Tensor, chosen: Selection | None) -> Tensor:
    """The chosen tokens of x [R or 1, N, ...] -> [R, K, ...]."""
    return x if chosen is None else chosen.of(x)


def scatter(x: Tensor, chosen: Selection, y: Tensor) -> Tensor:
    """x with the chosen tokens replaced by y [R, K, C]; padding goes nowhere."""
    # Padding is sent to an extra cell behind the map, so that it can never collide with a real token.
    index = chosen.index.where(chosen.real, x.shape[1])[..., None].expand_as(y)
    extra = x.new_zeros(len(x), 1, x.shape[2])
    return torch.cat((x, extra), dim=1).scatter(1, index, y.to(x.dtype))[:, :-1]
