"""What the queries of a self-attention layer can see: a growing cache, or a whole block-causal sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nextscale.engine.entropy import attention_entropy
from nextscale.engine.schedule import Schedule
from nextscale.kernels.attention import attend, runs_on
from nextscale.kernels.fp8 import reads
from nextscale.kernels.kv_store import split_and_store, stores
from nextscale.kernels.sdpa import attention, blank

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed, Selection
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
        self.more: Tensor | None = None  # [R] of them that are not yet counted in it,
        self.starts: Tensor | None = None  # or where those of a row begin, if they lie packed
        self.static_length = length  # where it has to be; there, lengths are counted as long as rows are equal, too
        self.ahead = 0  # entries of all rows that are not yet counted there
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
        self.static_length = None if self.static_length is None else self.static_length[rows]

    def append(self, k: Tensor, v: Tensor, count: Tensor | None = None) -> None:
        """Write behind each row's own end."""
        new = k.shape[2]
        self.reserve(new)
        # A CPU may look at the counts for nothing: rows without padding stay equally long, and need no mask.
        fixed = self.static_length is not None
        if count is not None and not fixed and count.device.type == "cpu" and bool((count == new).all()):
            count = None
        self._tell_rows_apart(count is not None)
        if self.length is None:
            self.k[:, :, self.used : self.used + new] = k
            self.v[:, :, self.used : self.used + new] = v
            self.ahead = new
        else:
            rows = torch.arange(len(self.length), device=k.device) if self.active is None else self.active
            slots = self.length[rows, None] + torch.arange(new, device=k.device)  # [R, K]
            self.k[rows[:, None], :, slots] = k.transpose(1, 2)
            self.v[rows[:, None], :, slots] = v.transpose(1, 2)
            self.length[rows] += new if count is None else count
        self.used += new

    def _tell_rows_apart(self, apart: bool) -> None:
        """From the first time on that rows grow by different numbers of tokens."""
        if self.length is None and (self.active is not None or apart):
            self.length = self.static_length
            if self.length is None:
                self.length = torch.full((len(self.k),), self.used, device=self.k.device)

    def visible(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of the rows at work, and a mask [R, 1, 1, S] if their lengths differ."""
        count_lengths([self])
        used, length = self.used, self.length
        if length is not None:
            length = length if self.active is None else length[self.active]
            # A CPU may look at lengths for nothing; on a GPU the host does not know how much of a fixed place is used.
            if length.device.type == "cpu":
                used = int(length.max())
                length = None if bool((length == used).all()) else length
            elif self.static_length is not None:
                used = self.k.shape[2]
        keys, values = self.k[:, :, :used], self.v[:, :, :used]
        if self.active is not None:
            keys, values = keys[self.active], values[self.active]
        if length is None:
            return keys, values, None
        mask = (torch.arange(used, device=keys.device) < length[:, None])[:, None, None]
        if self.static_length is not None:  # others write there, too, and what is NaN would not stay behind the mask
            keys, values = blank(keys, mask), blank(values, mask)
        return keys, values, mask

    def see(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        return self.look(attn, qkv, positions, chosen)[0]

    def look(
        self,
        attn: SelfAttention,
        qkv: Tensor,
        positions: Tensor | None,
        chosen: Selection | None = None,
        watched: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """What `see` gives, and the entropy of each query's weights, a mean over heads [R, K], of so many rows."""
        packed = None if chosen is None else chosen.as_packed
        if packed is not None and (self.active is not None or not stores(attn, qkv, positions)):
            seen, entropy = self.look(attn, packed.padded(qkv), positions, packed.plain, watched)
            return packed.packed(seen.transpose(1, 2)).transpose(1, 2), entropy
        return self.attend(attn, self.store(attn, qkv, positions, chosen), packed, watched)

    def store(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        """Keys and values of new tokens; their queries [R, H, K, D] are left."""
        packed = None if chosen is None else chosen.as_packed
        new = qkv.shape[1] if packed is None else packed.most
        count_lengths([self])
        kernel = packed is not None or (chosen is None and self.active is None and stores(attn, qkv, positions))
        if not kernel and self.tail is None:
            q, k, v = attn.split(qkv, taken(positions, chosen))
            self.append(k, v, None if chosen is None else chosen.count)
            return q
        # Behind the end of every row, or where no later scale will look for them.
        keys, values = (self.k, self.v) if self.tail is None else self.tail
        apart = chosen is not None or self.tail is not None
        self._tell_rows_apart(apart)
        start: int | Tensor = 0
        if self.tail is None:
            self.reserve(new)
            keys, values = self.k, self.v
            start = self.used if self.length is None else self.length
            self.used += new
            self.ahead = new if self.length is None else 0
        assert new <= keys.shape[2], "the cache has no room"
        if packed is not None:
            self.starts = packed.start
        elif self.length is not None:
            self.more = torch.full_like(self.length, new) if chosen is None else chosen.count
        if kernel:
            return split_and_store(attn, qkv, positions, keys, values, start, packed)
        q, *kv = attn.split(qkv, taken(positions, chosen))
        for place, found in zip((keys, values), kv, strict=True):
            place[:, :, :new] = found
        return q

    def attend(
        self, attn: SelfAttention, q: Tensor, packed: Packed | None = None, watched: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        scale, wanted, entropy = attn.softmax_scale, reads(attn.proj), bool(watched)
        if self.tail is not None or packed is not None or (self.length is not None and self._alone(q)):
            # No row has more: that tells how many programs should share the keys.
            cache = self.k[:, :, : self.used], self.v[:, :, : self.used], scale, self.length, self.more
            seen, spread = attend(q, *cache, entropy, self.tail, wanted, packed, grown=packed is not None)
            if packed is not None and spread is not None:
                spread = packed.padded(spread)
            return seen, None if spread is None else spread[:watched]
        keys, values, mask = self.visible()
        if mask is None and runs_on(q) and (entropy or q.shape[2] <= FEW):
            seen, spread = attend(q, keys, values, scale, entropy=entropy, reads=wanted)
            return seen, None if spread is None else spread[:watched]
        if not entropy:
            return attention(q, keys, values, scale, mask), None
        own = None if mask is None else mask[:watched]
        spread = attention_entropy(q[:watched], keys[:watched], scale, own)
        return attention(q, keys, values, scale, mask), spread

    def _alone(self, q: Tensor) -> bool:
        """Whether our kernel takes all rows."""
        return self.active is None and runs_on(q)


def count_lengths(caches: Sequence[LayerCache]) -> None:
    """What was stored last: of all layers at once, for one by one they would be as many kernels."""
    counted = [(cache.length, cache.more) for cache in caches if cache.length is not None and cache.more is not None]
    if counted:
        torch._foreach_add_(*map(list, zip(*counted, strict=True)))
    packed = [(cache.length, cache.starts) for cache in caches if cache.length is not None and cache.starts is not None]
    if packed:
        lengths, starts = zip(*packed, strict=True)
        torch._foreach_add_(list(lengths), list(torch.stack(starts).diff(dim=1).unbind()))
    level = [(cache.static_length, cache.ahead) for cache in caches if cache.static_length is not None and cache.ahead]
    if level:  # all by the same number
        torch._foreach_add_([place for place, _ in level], level[0][1])
    for cache in caches:
        cache.more, cache.starts, cache.ahead = None, None, 0


class WatchedCache:
    """A cache that also tells the entropy of the attention."""

    def __init__(self, cache: LayerCache, rows: int) -> None:
        self.cache, self.rows = cache, rows  # only the first rows are watched
        self.entropy: Tensor

    def see(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        seen, entropy = self.cache.look(attn, qkv, positions, chosen, self.rows)
        assert entropy is not None
        self.entropy = entropy  # [rows, K]
        return seen


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
