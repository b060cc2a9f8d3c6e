"""What the queries of a self-attention layer can see: a growing cache, or a whole block-causal sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nextscale.attention import attention, blank
from nextscale.entropy import attention_entropy
from nextscale.kernels.attention import attend, runs_on
from nextscale.kernels.fp8 import reads
from nextscale.kernels.keys import split_and_store, stores
from nextscale.schedule import Schedule

if TYPE_CHECKING:
    from nextscale.methods.selection import Selection
    from nextscale.models.layers import SelfAttention


FEW = 512  # queries up to which our kernel is faster than torch's choice on an H200, inside a CUDA graph


class Memory(Protocol):
    def see(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        """Attention of new tokens [R, K, 3, H, D] over all that is visible: [R, H, K, D], perhaps as the layer
        behind reads it. They are the `chosen` ones of all tokens, which `positions` [1 or R, N, ...] belong to."""
        ...


def taken(positions: Tensor | None, chosen: Selection | None) -> Tensor | None:
    return positions if positions is None or chosen is None else chosen.of(positions)


class LayerCache:
    """Keys and values of one layer, [R, H, capacity, D]; every row has its own length.

    Rows hold what their image kept, in the order it was computed. Positions are applied before caching,
    so an entry needs no bookkeeping. Slots behind a row's end are masked and overwritten by its next tokens.
    """

    def __init__(self, k: Tensor, v: Tensor, length: Tensor | None = None) -> None:
        """Empty, in these places; `length` is [R]."""
        self.k, self.v = k, v
        self.used = 0  # slots that any row may occupy
        self.length: Tensor | None = None  # entries of each row, once rows differ: then attention needs a mask
        self.more: Tensor | None = None  # of them that are not yet counted in it
        self.length_place = length  # where it has to be
        self.active: Tensor | None = None  # the rows at work in this scale; None = all
        # Where keys and values of this scale go instead: all layers may share it if no later scale will read them.
        self.tail: tuple[Tensor, Tensor] | None = None

    @classmethod
    def without_room(cls, rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """It grows."""
        return cls(*(torch.zeros(rows, heads, 0, head_dim, dtype=dtype, device=device) for _ in "kv"))

    @property
    def lengths(self) -> Tensor:
        """Entries of each row, [R]."""
        count_lengths([self])
        return torch.full((len(self.k),), self.used, device=self.k.device) if self.length is None else self.length

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` more per row. Called between scales, so that shapes are fixed inside one."""
        missing = self.used + tokens - self.k.shape[2]
        if missing > 0:
            self.k, self.v = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (self.k, self.v))

    def keep_rows(self, rows: Tensor | slice) -> None:
        """Forget all other rows for good: their image has stopped, or is no longer guided."""
        self.k, self.v = self.k[rows], self.v[rows]
        self.length = None if self.length is None else self.length[rows]
        self.length_place = None if self.length_place is None else self.length_place[rows]

    def append(self, k: Tensor, v: Tensor, count: Tensor | None = None) -> None:
        """Write behind each row's own end."""
        new = k.shape[2]
        self.reserve(new)
        # A CPU may look at the counts for nothing: rows without padding stay equally long, and need no mask.
        fixed = self.length_place is not None
        if count is not None and not fixed and count.device.type == "cpu" and bool((count == new).all()):
            count = None
        self._tell_rows_apart(count)
        if self.length is None:
            self.k[:, :, self.used : self.used + new] = k
            self.v[:, :, self.used : self.used + new] = v
        else:
            rows = torch.arange(len(self.length), device=k.device) if self.active is None else self.active
            slots = self.length[rows, None] + torch.arange(new, device=k.device)  # [R, K]
            self.k[rows[:, None], :, slots] = k.transpose(1, 2)
            self.v[rows[:, None], :, slots] = v.transpose(1, 2)
            self.length[rows] += new if count is None else count
        self.used += new

    def _tell_rows_apart(self, count: Tensor | None) -> None:
        """From the first time on that rows grow by different numbers of tokens."""
        if self.length is None and (self.active is not None or count is not None):
            place = self.length_place
            place = torch.empty(len(self.k), dtype=torch.long, device=self.k.device) if place is None else place
            self.length = place.fill_(self.used)

    def visible(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of the rows at work, and a mask [R, 1, 1, S] if their lengths differ."""
        count_lengths([self])
        # At fixed places the host does not know how much of them is used once rows differ.
        used = self.k.shape[2] if self.length is not None and self.length_place is not None else self.used
        keys, values, length = self.k[:, :, :used], self.v[:, :, :used], self.length
        if self.active is not None:
            keys, values = keys[self.active], values[self.active]
            length = None if length is None else length[self.active]
        if length is None:
            return keys, values, None
        mask = (torch.arange(used, device=keys.device) < length[:, None])[:, None, None]
        if self.length_place is not None:  # others write there, too, and what is NaN would not stay behind the mask
            keys, values = blank(keys, mask), blank(values, mask)
        return keys, values, mask

    def see(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        return self.attend(attn, self.store(attn, qkv, positions, chosen))

    def store(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        """Keys and values of new tokens; their queries [R, H, K, D] are left."""
        new, count = qkv.shape[1], None if chosen is None else chosen.count
        count_lengths([self])
        if self.tail is not None:
            if count is None:
                count = torch.full((len(qkv),), new, device=qkv.device)
            assert new <= self.tail[0].shape[2], "a layer keeps more than its plan said"
            self._tell_rows_apart(count)
            self.more = count
            if stores(attn, qkv, positions):
                return split_and_store(attn, qkv, positions, *self.tail, 0, chosen)
            q, *kv = attn.split(qkv, taken(positions, chosen))
            for place, found in zip(self.tail, kv, strict=True):
                place[:, :, :new] = found
            return q
        if self.active is None and stores(attn, qkv, positions):
            self.reserve(new)
            self._tell_rows_apart(count)
            start = self.used if self.length is None else self.length
            q = split_and_store(attn, qkv, positions, self.k, self.v, start, chosen)
            self.used += new
            if self.length is not None and count is not None:
                self.more = count
            elif self.length is not None:
                self.length += new
            return q
        q, k, v = attn.split(qkv, taken(positions, chosen))
        self.append(k, v, count)
        return q

    def attend(self, attn: SelfAttention, q: Tensor) -> Tensor:
        scale, wanted = attn.softmax_scale, reads(attn.proj)
        if self.tail is not None:
            return attend(q, self.k, self.v, scale, self.length, self.more, tail=self.tail, reads=wanted)[0]
        if self.length is not None and self.active is None and runs_on(q):
            return attend(q, self.k, self.v, scale, self.length, self.more, reads=wanted)[0]
        keys, values, mask = self.visible()
        if mask is None and q.shape[2] <= FEW and runs_on(q):
            return attend(q, keys, values, scale, reads=wanted)[0]
        return attention(q, keys, values, scale, mask)


def count_lengths(caches: Sequence[LayerCache]) -> None:
    """What was stored last: of all layers at once, for one by one they would be as many kernels."""
    waiting = [(cache.length, cache.more) for cache in caches if cache.length is not None and cache.more is not None]
    if waiting:
        torch._foreach_add_(*map(list, zip(*waiting, strict=True)))
    for cache in caches:
        cache.more = None


class WatchedCache:
    """A cache that also tells the entropy of the attention."""

    def __init__(self, cache: LayerCache, rows: int) -> None:
        self.cache, self.rows = cache, rows  # only the first rows are watched
        self.entropy: Tensor

    def see(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        cache, scale = self.cache, attn.softmax_scale
        q = cache.store(attn, qkv, positions, chosen)
        if cache.active is None and runs_on(q):
            seen, entropy = attend(q, cache.k, cache.v, scale, cache.lengths, entropy=True, reads=reads(attn.proj))
            assert entropy is not None
            self.entropy = entropy[: self.rows]
            return seen
        keys, _, mask = cache.visible()
        visible = None if mask is None else mask[: self.rows]
        self.entropy = attention_entropy(q[: self.rows], keys[: self.rows], scale, visible)
        return self.cache.attend(attn, q)


class BlockCausal:
    """All scales at once, as in training: a token sees its own scale and every earlier one."""

    def __init__(self, schedule: Schedule, context: int = 0) -> None:
        """`context` tokens stand in front of the first scale, and belong to it."""
        ends = [context + s.start + s.tokens for s in schedule]
        self.spans = list(zip([0, *ends], ends, strict=False))

    def see(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        q, k, v = attn.split(qkv, positions)
        scale = attn.softmax_scale
        # One unmasked call per scale reads no key twice more than it must and needs no L x L mask.
        parts = [attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], scale) for a, b in self.spans]
        return torch.cat(parts, dim=2)
