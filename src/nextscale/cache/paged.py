"""A KV cache whose memory follows what is kept: pages, which rows of all layers take one after the other.

A page is for some tokens of one row in one layer: keys [H, PAGE, D], then values. Which pages a row has says a table on
the device, and the kernels that store keys take new ones there (`kernels/pages_triton.py`), in the order of layers and
rows. So a graph does not know how many there are. The host sees to it before every scale that there are enough of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.cache.kv import LayerCache
from nextscale.kernels.attention import fused
from nextscale.kernels.fp8 import reads
from nextscale.kernels.kv_store import split_and_store

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed, Selection
    from nextscale.models.layers import SelfAttention

PAGE = 64  # tokens: as many keys as attention looks at at once
STEP, SHARE = 64, 0.05  # pages that more are made at a time, and of those there are
FIRST = 0.15  # of the pages of a run that keeps all tokens: those that are made at first


@dataclass(frozen=True)
class LayerPages:
    """What kernels know of the pages of one layer."""

    table: Tensor  # [R, most] int64: where every page of a row begins, in elements from the first page of all on
    free: Tensor  # the same of all pages there are, in the order in which they are taken
    before: Tensor  # int32: how many were taken by the layer before,
    after: Tensor  # and with those of this one
    size: int  # tokens of a page


class Pages:
    """The pages of all layers. Their memory never moves, and may lie anywhere."""

    def __init__(
        self,
        layers: int,
        rows: int,
        page: Sequence[int],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        take: Callable[[Sequence[int], torch.dtype], Tensor],
    ) -> None:
        """For so many tokens of a row at most; a page is [H, PAGE, D], and `take` gives memory."""
        assert layers > 1, "a layer must not read what it writes"
        self.layers, self.rows, self.page, self.dtype, self.take = layers, rows, tuple(page), dtype, take
        self.size = self.page[1]
        of_row = max(-(-tokens // self.size), 1)
        self.table = torch.zeros(layers, rows, of_row, dtype=torch.long, device=device)
        self.free = torch.zeros(layers * rows * of_row, dtype=torch.long, device=device)
        self.taken = torch.zeros(layers, dtype=torch.int32, device=device)  # when this layer has stored its keys
        self.memory: dict[int, Tensor] = {}  # every page, by where it begins
        self.bound = 0  # no more than so many are taken
        self.add(max(layers * rows, int(FIRST * self.free.numel())))

    @property
    def first(self) -> Tensor:
        """The page that all others are found from."""
        return next(iter(self.memory.values()))

    def begin(self) -> None:
        """A call: nothing is taken."""
        self.taken.zero_()
        self.bound = 0

    def repeat(self) -> None:
        """Every page once more, and again, so that a run that keeps all tokens has enough: for rehearsals, of which
        nobody looks at the result."""
        there = torch.tensor([*self.memory])
        self.free.copy_(there[torch.arange(self.free.numel()) % len(there)])

    def layer(self, layer: int) -> LayerPages:
        return LayerPages(self.table[layer], self.free, self.taken[layer - 1], self.taken[layer], self.size)

    def provide(self, new: int, end: int, rows: int, told: Callable[[], int]) -> bool:
        """Enough pages for a scale of at most `new` tokens in so many rows, `end` with all before them, whatever is
        kept; whether more had to be made. Who calls `told` waits for how many pages are taken."""
        more, most = self.layers * rows * -(-new // self.size), self.layers * self.rows * -(-end // self.size)
        if min(self.bound + more, most) > len(self.memory):
            self.bound = told()
        self.bound = min(self.bound + more, most)
        missing = self.bound - len(self.memory)
        if missing > 0:
            self.add(missing)
        return missing > 0

    def add(self, missing: int) -> None:
        """At least so many pages: some more, so that it is not asked for often, but no more than can be used."""
        there = len(self.memory)
        steps = -(-max(missing, int(SHARE * there)) // STEP)
        made = [self.take((2, *self.page), self.dtype) for _ in range(min(steps * STEP, self.free.numel() - there))]
        first = (self.first if self.memory else made[0]).data_ptr()
        places = [(page.data_ptr() - first) // self.dtype.itemsize for page in made]
        self.memory |= zip(places, made, strict=True)
        # In the order of the stream: kernels that run now do not look there.
        found = torch.tensor(places, pin_memory=self.free.is_cuda)
        self.free[there : there + len(places)].copy_(found, non_blocking=True)


class PagedCache(LayerCache):
    """Keys and values of one layer in pages. Rows are always told apart: how long they are, the device knows."""

    def __init__(self, pages: Pages, layer: int, length: Tensor) -> None:
        heads, _, width = pages.page
        nothing = pages.first.new_empty(len(length), heads, 0, width)
        super().__init__(nothing, nothing, length)
        self.length = length
        self.all_pages, self.pages = pages, pages.layer(layer)

    def reserve(self, tokens: int) -> None:
        """Pages are provided for all layers at once."""

    def keep_rows(self, rows: Tensor | slice) -> None:
        super().keep_rows(rows)
        self.length = self.static_length
        self.pages = replace(self.pages, table=self.pages.table[rows])

    def look(
        self,
        attn: SelfAttention,
        qkv: Tensor,
        positions: Tensor | None,
        chosen: Selection | None = None,
        watched: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        packed = None if chosen is None else chosen.as_packed
        return self.attend(attn, self.store(attn, qkv, positions, chosen), packed, watched)

    def store(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        packed = None if chosen is None else chosen.as_packed
        assert (packed is None) == (chosen is None), "padding would take pages"
        assert self.active is None, "rows that rest have no tokens"
        assert self.starts is None, "a layer stores once in a scale"
        new = qkv.shape[1] if packed is None else packed.most
        if packed is None:
            self.ahead = new
        else:
            self.starts = packed.start
        if self.tail is not None:
            return split_and_store(attn, qkv, positions, *self.tail, 0, packed)
        self.used += new
        assert self.length is not None
        return split_and_store(attn, qkv, positions, *self._views(), self.length, packed, self.pages)

    def attend(
        self, attn: SelfAttention, q: Tensor, packed: Packed | None = None, watched: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        k, v = self._views()
        more, wanted, entropy = self.ahead if packed is None else None, reads(attn.proj), bool(watched)
        seen, spread = fused(
            q,
            k,
            v,
            attn.softmax_scale,
            self.length,
            more,
            entropy,
            self.tail,
            wanted,
            packed,
            grown=packed is not None,
            pages=self.pages,
        )
        if packed is not None and spread is not None:
            spread = packed.padded(spread)
        return seen, None if spread is None else spread[:watched]

    def _views(self) -> tuple[Tensor, Tensor]:
        """Keys and values [R, H, used, D], that is where they would lie in the first page; a table says where they do.
        No row has more than `used`."""
        rows, heads, _, width = self.k.shape
        shape, strides = (rows, heads, self.used, width), (0, self.pages.size * width, 0, 1)
        keys, values = self.all_pages.first
        return keys.as_strided(shape, strides), values.as_strided(shape, strides)

    def copied(self) -> LayerCache:
        """The same without pages, for code that knows none. It waits."""
        assert self.length is not None
        lengths = self.length.tolist()
        keys, values = self.k.new_zeros(2, len(lengths), self.k.shape[1], max(lengths), self.k.shape[3])
        for row, (length, places) in enumerate(zip(lengths, self.pages.table.tolist(), strict=True)):
            for n in range(0, length, self.pages.size):
                page = self.all_pages.memory[places[n // self.pages.size]][:, :, : length - n]
                keys[row, :, n : n + page.shape[2]], values[row, :, n : n + page.shape[2]] = page
        cache = LayerCache(keys, values)
        cache.used = max(lengths)
        cache.length = None if len(set(lengths)) == 1 else self.length.clone()
        return cache
