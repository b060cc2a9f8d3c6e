"""What a layer added at the last scale, for the tokens that skip it at this one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.engine.schedule import Grid, Schedule
from nextscale.methods.selection import Selection, scatter

if TYPE_CHECKING:
    from nextscale.engine.rows import Rows

Row = tuple[int, bool]  # image, conditional


def keys_of(rows: Rows) -> list[Row]:
    return [(i, True) for i in rows.image_ids] + [(i, False) for i in rows.unconditional]


def resize_tokens(x: Tensor, grid: Grid, to: Grid, mode: str) -> Tensor:
    """Token maps [R, h w, C] of one grid on another."""
    if grid == to:
        return x
    maps = x.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(maps, size=to, mode=mode).flatten(2).transpose(1, 2)


def take(maps: Tensor, rows: list[int]) -> Tensor:
    """Some rows. Neighbors are a view: a list would be copied to the device, which the host waits for."""
    first = rows[0] if rows else 0
    neighbors = rows == list(range(first, first + len(rows)))
    return maps[first : first + len(rows)] if neighbors else maps[rows]


@dataclass(frozen=True)
class _Entry:
    grid: Grid
    rows: tuple[Row, ...]
    maps: Tensor  # [R, N, C]

    def without(self, rows: set[Row]) -> _Entry:
        left = [i for i, key in enumerate(self.rows) if key not in rows]
        if len(left) == len(self.rows):
            return self
        return _Entry(self.grid, tuple(self.rows[i] for i in left), take(self.maps, left))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


class Places:
    """Fixed places for maps. A scale writes its own and reads those of the scale before: two for a name are enough.

    Others are only needed where a scale was left out, or where a name has the same grid at every scale.
    """

    def __init__(self, schedule: Schedule, take: Callable[..., Tensor] | None = None) -> None:
        """`take` gives the memory of a tensor by shape and dtype; else it is asked for."""
        self.take = take
        before = [s for s in schedule if s.index < len(schedule) - 1]  # nobody reads what the last scale leaves
        room = {half: max((s.tokens for s in before if s.index % 2 == half), default=1) for half in (0, 1)}
        self.room = {s.grid: (s.index % 2, room[s.index % 2]) for s in before}
        self.tensors: dict[Hashable, Tensor] = {}

    def find(
        self,
        name: Hashable,
        grid: Grid,
        rows: tuple[Row, ...],
        like: Tensor,
        dtype: torch.dtype,
        used: Sequence[Tensor] = (),
    ) -> Tensor:
        """One that leaves those alone which are `used`: they are read meanwhile, and again if a scale is run again."""
        r, n, c = like.shape
        usual: tuple[Hashable, int] = self.room.get(grid, (grid, n))
        for which, cells in itertools.chain([usual], (((grid, spare), n) for spare in itertools.count())):
            key = (name, which, rows, dtype, c)
            if key not in self.tensors:
                size = r * max(cells, n) * c
                new = (
                    torch.empty(size, dtype=dtype, device=like.device)
                    if self.take is None
                    else self.take((size,), dtype)
                )
                self.tensors[key] = new
            place = self.tensors[key][: r * n * c].view(r, n, c)
            if not any(overlap(place, other) for other in used):
                return place
        raise AssertionError("there is always another place")

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


class TokenCache:
    """The newest map of every row, whatever scale it is from."""

    def __init__(self, name: Hashable = None, places: Places | None = None) -> None:
        self.name, self.places = name, places
        self.entries: tuple[_Entry, ...] = ()

    def store(self, rows: Rows, grid: Grid, maps: Tensor) -> None:
        keys = keys_of(rows)
        fresh = set(keys)
        left = (entry.without(fresh) for entry in self.entries)  # images that did not run keep what they have
        newest = _Entry(grid, tuple(keys), self._placed(grid, tuple(keys), maps))
        self.entries = (*(entry for entry in left if entry.rows), newest)

    def _placed(self, grid: Grid, rows: tuple[Row, ...], maps: Tensor) -> Tensor:
        if self.places is None:
            return maps
        place = self.places.find(self.name, grid, rows, maps, maps.dtype, self._used)
        return place if maps.data_ptr() == place.data_ptr() else place.copy_(maps)

    def place(self, rows: Rows, grid: Grid, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Where a map may be written before it is stored, which then copies nothing."""
        if self.places is None:
            return torch.empty_like(like, dtype=dtype)
        return self.places.find(self.name, grid, tuple(keys_of(rows)), like, dtype, self._used)

    @property
    def _used(self) -> list[Tensor]:
        return [entry.maps for entry in self.entries]

    def newest(self, rows: Rows) -> _Entry | None:
        """The newest map, if it has exactly these rows."""
        entry = self.entries[-1] if self.entries else None
        return entry if entry is not None and entry.rows == tuple(keys_of(rows)) else None

    def read(self, rows: Rows, grid: Grid, mode: str) -> Tensor | None:
        """Maps for these rows on this grid; None if a row has none yet."""
        keys = keys_of(rows)
        newest = self.newest(rows)
        if newest is not None:  # the usual case: nobody left
            return resize_tokens(newest.maps, newest.grid, grid, mode)
        found: dict[Row, Tensor] = {}
        for entry in self.entries:
            wanted = [i for i, key in enumerate(entry.rows) if key in keys]
            if wanted:
                resized = resize_tokens(take(entry.maps, wanted), entry.grid, grid, mode)
                found.update({entry.rows[i]: resized[n] for n, i in enumerate(wanted)})
        if len(found) < len(set(keys)):
            return None
        return torch.stack([found[key] for key in keys])


class TokenCaches(dict[Hashable, TokenCache]):
    """All that a policy remembers from scale to scale, by name; at fixed places if captured scales have to find it."""

    def __init__(self, places: Places | None = None) -> None:
        super().__init__()
        self.places = places

    def __missing__(self, name: Hashable) -> TokenCache:
        self[name] = TokenCache(name, self.places)
        return self[name]

    def entries(self) -> dict[Hashable, tuple[_Entry, ...]]:
        """What is remembered now."""
        return {name: cache.entries for name, cache in self.items()}

    def remember(self, entries: dict[Hashable, tuple[_Entry, ...]]) -> None:
        """What another scale left, and nothing else."""
        for name in {*self, *entries}:
            self[name].entries = entries.get(name, ())


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
