"""A KV cache whose memory follows what is kept: pages, which rows of all layers allocate one after the other.

A page is for some tokens of one row in one layer: keys [H, PAGE_SIZE, D], then values. A table on the device says which
pages a row has, and the kernels that store keys allocate new ones there (`kernels/triton/paged_kv.py`), in the order of
layers and rows. So a graph does not know how many there are. The host ensures before every scale that there are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.cache.kv import KVCache
from nextscale.kernels.flash_attention import fused_attention
from nextscale.kernels.fp8 import input_format
from nextscale.kernels.kv_store import split_and_store

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed, Selection
    from nextscale.models.layers import SelfAttention

PAGE_SIZE = 64  # tokens: as many keys as attention reads at once
GROWTH_STEP, GROWTH_SHARE = 64, 0.05  # a pool grows by multiples of this, and by at least this share of its pages
INITIAL_SHARE = 0.15  # of the pages of a run that keeps all tokens: those that are made at first


@dataclass(frozen=True)
class LayerPageTable:
    """The pages of one layer, as kernels see them."""

    table: Tensor  # [R, most] int64: where every page of a row begins, in elements from the first page of all on
    free: Tensor  # the same of all pages of the pool, in the order in which they are taken
    before: Tensor  # int32: how many were taken by the layer before,
    after: Tensor  # and with those of this one
    size: int  # tokens of a page


class PagePool:
    """The pages of all layers. Their memory never moves, and may lie anywhere."""

    def __init__(
        self,
        layers: int,
        rows: int,
        page_shape: Sequence[int],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        alloc: Callable[[Sequence[int], torch.dtype], Tensor],
    ) -> None:
        """A pool for at most `tokens` of a row; a page is [H, PAGE_SIZE, D], and `alloc` allocates memory."""
        assert layers > 1, "a layer must not read what it writes"
        self.layers, self.rows, self.page_shape, self.dtype, self.alloc = layers, rows, tuple(page_shape), dtype, alloc
        self.page_size = self.page_shape[1]
        per_row = max(-(-tokens // self.page_size), 1)
        self.page_table = torch.zeros(layers, rows, per_row, dtype=torch.long, device=device)
        self.free = torch.zeros(layers * rows * per_row, dtype=torch.long, device=device)
        self.taken = torch.zeros(layers, dtype=torch.int32, device=device)  # when this layer has stored its keys
        self.pages: dict[int, Tensor] = {}  # by where they begin
        self.max_taken = 0  # no more than so many are taken
        self.grow(max(layers * rows, int(INITIAL_SHARE * self.free.numel())))

    @property
    def first(self) -> Tensor:
        """The page that all others are found from."""
        return next(iter(self.pages.values()))

    def reset(self) -> None:
        """Free all pages, at the beginning of a call."""
        self.taken.zero_()
        self.max_taken = 0

    def repeat_pages(self) -> None:
        """List every page again and again, so that a run that keeps all tokens has enough: for warm-up runs, whose
        results are not used."""
        pages = torch.tensor([*self.pages])
        self.free.copy_(pages[torch.arange(self.free.numel()) % len(pages)])

    def layer_table(self, layer: int) -> LayerPageTable:
        before, after = self.taken[layer - 1], self.taken[layer]
        return LayerPageTable(self.page_table[layer], self.free, before, after, self.page_size)

    def ensure_free(self, new: int, end: int, rows: int, taken_pages: Callable[[], int]) -> bool:
        """Ensure enough pages for a scale of at most `new` tokens in each of `rows`, `end` with all before them,
        whatever is kept; return whether more had to be made. `taken_pages` waits for the device."""
        needed = self.layers * rows * -(-new // self.page_size)
        most = self.layers * self.rows * -(-end // self.page_size)
        if min(self.max_taken + needed, most) > len(self.pages):
            self.max_taken = taken_pages()
        self.max_taken = min(self.max_taken + needed, most)
        missing = self.max_taken - len(self.pages)
        if missing > 0:
            self.grow(missing)
        return missing > 0

    def grow(self, missing: int) -> None:
        """Make at least so many pages: some more, so that it is seldom asked for, but no more than can be used."""
        count = len(self.pages)
        steps = -(-max(missing, int(GROWTH_SHARE * count)) // GROWTH_STEP)
        new = min(steps * GROWTH_STEP, self.free.numel() - count)
        made = [self.alloc((2, *self.page_shape), self.dtype) for _ in range(new)]
        first = (self.first if self.pages else made[0]).data_ptr()
        offsets = [(page.data_ptr() - first) // self.dtype.itemsize for page in made]
        self.pages |= zip(offsets, made, strict=True)
        # In the order of the stream: kernels that run now do not look there.
        listed = torch.tensor(offsets, pin_memory=self.free.is_cuda)
        self.free[count : count + new].copy_(listed, non_blocking=True)


class PagedKVCache(KVCache):
    """Keys and values of one layer in pages. Rows always have their own lengths, and the device knows them."""

    def __init__(self, pool: PagePool, layer: int, lengths: Tensor) -> None:
        heads, _, width = pool.page_shape
        no_entries = pool.first.new_empty(len(lengths), heads, 0, width)
        super().__init__(no_entries, no_entries, lengths)
        self.row_lengths = lengths
        self.pool, self.pages = pool, pool.layer_table(layer)

    def allocate(self, tokens: int) -> None:
        """Nothing: pages are allocated for all layers at once."""

    def keep_rows(self, rows: Tensor | slice) -> None:
        super().keep_rows(rows)
        self.row_lengths = self.static_lengths
        self.pages = replace(self.pages, table=self.pages.table[rows])

    def _stores_packed(self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None) -> bool:
        return True

    def update(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        packed = None if chosen is None else chosen.as_packed
        assert (packed is None) == (chosen is None), "padding would take pages"
        assert self.active_rows is None, "inactive rows have no tokens"
        assert self.pending_starts is None, "a layer stores once in a scale"
        new = qkv.shape[1] if packed is None else packed.most
        if packed is None:
            self.pending = new
        else:
            self.pending_starts = packed.start
        if self.last_scale_kv is not None:
            return split_and_store(attn, qkv, positions, *self.last_scale_kv, 0, packed)
        self.max_length += new
        assert self.row_lengths is not None
        return split_and_store(attn, qkv, positions, *self._first_page(), self.row_lengths, packed, self.pages)

    def attention(
        self, attn: SelfAttention, q: Tensor, packed: Packed | None = None, entropy_rows: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        return fused_attention(
            q,
            *self._first_page(),
            attn.softmax_scale,
            self.row_lengths,
            self.pending if packed is None else None,
            bool(entropy_rows),
            self.last_scale_kv,
            input_format(attn.proj),
            packed,
            grown=packed is not None,
            pages=self.pages,
        )

    def _first_page(self) -> tuple[Tensor, Tensor]:
        """Keys and values [R, H, max_length, D] as if they lay in the first page; a table says where they do."""
        rows, heads, _, width = self.k.shape
        shape, strides = (rows, heads, self.max_length, width), (0, self.pages.size * width, 0, 1)
        keys, values = self.pool.first
        return keys.as_strided(shape, strides), values.as_strided(shape, strides)

    def without_pages(self) -> KVCache:
        """A copy for code that knows no pages. It waits for the device."""
        assert self.row_lengths is not None
        lengths = self.row_lengths.tolist()
        keys, values = self.k.new_zeros(2, len(lengths), self.k.shape[1], max(lengths), self.k.shape[3])
        for row, (length, offsets) in enumerate(zip(lengths, self.pages.table.tolist(), strict=True)):
            for n in range(0, length, self.pages.size):
                page = self.pool.pages[offsets[n // self.pages.size]][:, :, : length - n]
                keys[row, :, n : n + page.shape[2]], values[row, :, n : n + page.shape[2]] = page
        cache = KVCache(keys, values)
        cache.max_length = max(lengths)
        cache.row_lengths = None if len(set(lengths)) == 1 else self.row_lengths.clone()
        return cache
