"""What a layer added at the last scale, for the tokens that skip it at this one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.methods.selection import Selection, scatter
from nextscale.run import Rows
from nextscale.schedule import Grid

Row = tuple[int, bool]  # image, conditional


def keys_of(rows: Rows) -> list[Row]:
    return [(i, True) for i in rows.which] + [(i, False) for i in rows.unconditional]


def resize_tokens(x: Tensor, grid: Grid, to: Grid, mode: str) -> Tensor:
    """Token maps [R, h w, C] of one grid on another."""
    if grid == to:
        return x
    maps = x.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(maps, size=to, mode=mode).flatten(2).transpose(1, 2)


@dataclass
class _Entry:
    grid: Grid
    rows: list[Row]
    maps: Tensor  # [R, N, C]


class TokenCache:
    """The newest map of every row, whatever scale it is from. One cache per layer and group."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def store(self, rows: Rows, grid: Grid, maps: Tensor) -> None:
        keys = keys_of(rows)
        fresh = set(keys)
        for entry in self.entries:  # images that did not run keep what they have
            left = [i for i, key in enumerate(entry.rows) if key not in fresh]
            entry.maps, entry.rows = entry.maps[left], [entry.rows[i] for i in left]
        self.entries = [e for e in self.entries if e.rows] + [_Entry(grid, keys, maps)]

    def read(self, rows: Rows, grid: Grid, mode: str) -> Tensor | None:
        """Maps for these rows on this grid; None if a row has none yet."""
        keys = keys_of(rows)
        newest = self.entries[-1] if self.entries else None
        if newest is not None and newest.rows == keys:  # the usual case: nobody left
            return resize_tokens(newest.maps, newest.grid, grid, mode)
        found: dict[Row, Tensor] = {}
        for entry in self.entries:
            wanted = [i for i, key in enumerate(entry.rows) if key in keys]
            if wanted:
                resized = resize_tokens(entry.maps[wanted], entry.grid, grid, mode)
                found.update({entry.rows[i]: resized[n] for n, i in enumerate(wanted)})
        if len(found) < len(set(keys)):
            return None
        return torch.stack([found[key] for key in keys])


def store_chosen(
    cache: TokenCache, rows: Rows, grid: Grid, chosen: Selection | None, values: Tensor, mode: str
) -> None:
    """Values [R, K, C] of the chosen tokens; a token that was not chosen keeps what it had, on the new grid."""
    if chosen is not None:
        before = cache.read(rows, grid, mode)
        if before is None:
            before = values.mean(1, keepdim=True).expand(-1, grid[0] * grid[1], -1)
        values = scatter(before, chosen, values)
    cache.store(rows, grid, values)
