"""Token maps that a policy keeps from scale to scale, such as what a layer added."""

from __future__ import annotations

import functools
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


def row_keys(rows: Rows) -> list[Row]:
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


class StaticMaps:
    """Static buffers for maps. A scale writes one and reads that of the scale before: two per name are enough, but
    where a scale was left out, or a name has the same grid at every scale.
    """

    def __init__(self, schedule: Schedule, allocate: Callable[..., Tensor] | None = None) -> None:
        """`allocate` makes a tensor of a shape and dtype."""
        self.allocate = allocate
        before = [s for s in schedule if s.index < len(schedule) - 1]  # nobody reads what the last scale leaves
        capacity = {parity: max((s.tokens for s in before if s.index % 2 == parity), default=1) for parity in (0, 1)}
        self.slots = {s.grid: (s.index % 2, capacity[s.index % 2]) for s in before}
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
        """Find a buffer that overlaps none of the `used` ones, which are read meanwhile."""
        r, n, c = like.shape
        usual: tuple[Hashable, int] = self.slots.get(grid, (grid, n))
        for slot, cells in itertools.chain([usual], (((grid, spare), n) for spare in itertools.count())):
            key = (name, slot, rows, dtype, c)
            if key not in self.tensors:
                size = r * max(cells, n) * c
                make = functools.partial(torch.empty, dtype=dtype, device=like.device)
                self.tensors[key] = make(size) if self.allocate is None else self.allocate((size,), dtype)
            buffer = self.tensors[key][: r * n * c].view(r, n, c)
            if not any(overlap(buffer, other) for other in used):
                return buffer
        raise AssertionError("there is always another buffer")

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


class TokenCache:
    """The latest map of every row, whatever scale it is from."""

    def __init__(self, name: Hashable = None, buffers: StaticMaps | None = None) -> None:
        self.name, self.buffers = name, buffers
        self.entries: tuple[_Entry, ...] = ()

    def store(self, rows: Rows, grid: Grid, maps: Tensor) -> None:
        keys = row_keys(rows)
        fresh = set(keys)
        left = (entry.without(fresh) for entry in self.entries)  # images that did not run keep what they have
        latest = _Entry(grid, tuple(keys), self._static(grid, tuple(keys), maps))
        self.entries = (*(entry for entry in left if entry.rows), latest)

    def _static(self, grid: Grid, rows: tuple[Row, ...], maps: Tensor) -> Tensor:
        if self.buffers is None:
            return maps
        buffer = self.buffers.find(self.name, grid, rows, maps, maps.dtype, self._used)
        return buffer if maps.data_ptr() == buffer.data_ptr() else buffer.copy_(maps)

    def buffer(self, rows: Rows, grid: Grid, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate where a map may be written before it is stored, which then copies nothing."""
        if self.buffers is None:
            return torch.empty_like(like, dtype=dtype)
        return self.buffers.find(self.name, grid, tuple(row_keys(rows)), like, dtype, self._used)

    @property
    def _used(self) -> list[Tensor]:
        return [entry.maps for entry in self.entries]

    def latest(self, rows: Rows) -> _Entry | None:
        """Get the latest map, if it has exactly these rows."""
        entry = self.entries[-1] if self.entries else None
        return entry if entry is not None and entry.rows == tuple(row_keys(rows)) else None

    def read(self, rows: Rows, grid: Grid, mode: str) -> Tensor | None:
        """Resize the maps of these rows to this grid; None if a row has none yet."""
        keys = row_keys(rows)
        latest = self.latest(rows)
        if latest is not None:  # the usual case: no row has left
            return resize_tokens(latest.maps, latest.grid, grid, mode)
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
    """What a policy keeps from scale to scale, by name; in static buffers if captured scales read it."""

    def __init__(self, buffers: StaticMaps | None = None) -> None:
        super().__init__()
        self.buffers = buffers

    def __missing__(self, name: Hashable) -> TokenCache:
        self[name] = TokenCache(name, self.buffers)
        return self[name]

    def entries(self) -> dict[Hashable, tuple[_Entry, ...]]:
        """Get what is kept now."""
        return {name: cache.entries for name, cache in self.items()}

    def load(self, entries: dict[Hashable, tuple[_Entry, ...]]) -> None:
        """Keep what another scale left, and nothing else."""
        for name in {*self, *entries}:
            self[name].entries = entries.get(name, ())


def store_selected(
    cache: TokenCache, rows: Rows, grid: Grid, chosen: Selection | None, values: Tensor, mode: str
) -> None:
    """Store values [R, K, C] of the chosen tokens; the others keep what they had, on the new grid."""
    if chosen is not None:
        before = cache.read(rows, grid, mode)
        if before is None:
            before = values.mean(1, keepdim=True).expand(-1, grid[0] * grid[1], -1)
        values = scatter(before, chosen, values)
    cache.store(rows, grid, values)
