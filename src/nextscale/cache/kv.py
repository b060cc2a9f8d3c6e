"""The KV cache of a layer, and attention over it or over a whole block-causal sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.engine.schedule import Schedule
from nextscale.kernels import flash_attention, kv_store
from nextscale.kernels.fp8 import input_format
from nextscale.kernels.kv_store import split_and_store
from nextscale.kernels.sdpa import attention_entropy, scaled_dot_product_attention, zero_masked

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed, Selection
    from nextscale.models.layers import SelfAttention


MAX_KERNEL_QUERIES = 512  # up to which our kernel is faster than torch's choice on an H200, inside a CUDA graph


def select_positions(positions: Tensor | None, chosen: Selection | None) -> Tensor | None:
    return positions if positions is None or chosen is None else chosen.of(positions)


class KVCache:
    """Keys and values of one layer, [R, H, capacity, D]; every row has its own length.

    Rows hold what their image kept, in the order it was computed. Positions are applied before caching,
    so an entry needs no bookkeeping. What lies behind a row's end is masked and overwritten by its next tokens.
    """

    def __init__(self, k: Tensor, v: Tensor, static_lengths: Tensor | None = None) -> None:
        """An empty cache in these tensors. `static_lengths` [R] is where lengths have to be: there they are counted
        as long as rows are equal, too."""
        self.k, self.v = k, v
        self.max_length = 0  # entries that any row may have
        self.row_lengths: Tensor | None = None  # [R], once rows have diverged: then attention needs a mask
        self.static_lengths = static_lengths
        # Entries that are not yet counted: [R] of each row, where those of a row begin if they are packed, or of every
        # row in `static_lengths`.
        self.pending_per_row: Tensor | None = None
        self.pending_starts: Tensor | None = None
        self.pending = 0
        self.active_rows: Tensor | None = None  # in this scale; None = all
        # Where keys and values of the last scale go instead: layers share it, for no later scale reads them.
        self.last_scale_kv: tuple[Tensor, Tensor] | None = None

    @classmethod
    def empty(cls, rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """A cache without capacity."""
        return cls(*(torch.zeros(rows, heads, 0, head_dim, dtype=dtype, device=device) for _ in "kv"))

    @property
    def lengths(self) -> Tensor:
        """Entries of each row, [R]."""
        commit_lengths([self])
        if self.row_lengths is None:
            return torch.full((len(self.k),), self.max_length, device=self.k.device)
        return self.row_lengths

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def allocate(self, tokens: int) -> None:
        """Grow the capacity to `tokens` more per row. Called between scales, so that shapes are fixed inside one."""
        missing = self.max_length + tokens - self.k.shape[2]
        if missing > 0:
            self.k, self.v = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (self.k, self.v))

    def keep_rows(self, rows: Tensor | slice) -> None:
        """Forget all other rows for good: their image has stopped, or is no longer guided."""
        self.k, self.v = self.k[rows], self.v[rows]
        self.row_lengths = None if self.row_lengths is None else self.row_lengths[rows]
        self.static_lengths = None if self.static_lengths is None else self.static_lengths[rows]

    def append(self, k: Tensor, v: Tensor, count: Tensor | None = None) -> None:
        """Write behind each row's own end; the first `count` [R] of the tokens stay."""
        new = k.shape[2]
        self.allocate(new)
        # On a CPU counts cost nothing to read: rows without padding stay equally long, and need no mask.
        static = self.static_lengths is not None
        if count is not None and not static and count.device.type == "cpu" and bool((count == new).all()):
            count = None
        self._diverge(count is not None)
        if self.row_lengths is None:
            self.k[:, :, self.max_length : self.max_length + new] = k
            self.v[:, :, self.max_length : self.max_length + new] = v
            self.pending = new
        else:
            every_row = torch.arange(len(self.row_lengths), device=k.device)
            rows = every_row if self.active_rows is None else self.active_rows
            entries = self.row_lengths[rows, None] + torch.arange(new, device=k.device)  # [R, K]
            self.k[rows[:, None], :, entries] = k.transpose(1, 2)
            self.v[rows[:, None], :, entries] = v.transpose(1, 2)
            self.row_lengths[rows] += new if count is None else count
        self.max_length += new

    def _diverge(self, by_counts: bool) -> None:
        """Keep a length of every row, from the first time on that they grow by different numbers of tokens."""
        if self.row_lengths is None and (self.active_rows is not None or by_counts):
            self.row_lengths = self.static_lengths
            if self.row_lengths is None:
                self.row_lengths = torch.full((len(self.k),), self.max_length, device=self.k.device)

    def view(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of the active rows, and a mask [R, 1, 1, S] if their lengths differ."""
        commit_lengths([self])
        end, lengths = self.max_length, self.row_lengths
        if lengths is not None:
            lengths = lengths if self.active_rows is None else lengths[self.active_rows]
            # On a CPU lengths cost nothing to read; on a GPU the host does not know how much of a static cache is used.
            if lengths.device.type == "cpu":
                end = int(lengths.max())
                lengths = None if bool((lengths == end).all()) else lengths
            elif self.static_lengths is not None:
                end = self.k.shape[2]
        keys, values = self.k[:, :, :end], self.v[:, :, :end]
        if self.active_rows is not None:
            keys, values = keys[self.active_rows], values[self.active_rows]
        if lengths is None:
            return keys, values, None
        mask = (torch.arange(end, device=keys.device) < lengths[:, None])[:, None, None]
        if self.static_lengths is not None:  # others write there, too, and what is NaN would not stay behind the mask
            keys, values = zero_masked(keys, mask), zero_masked(values, mask)
        return keys, values, mask

    def attend(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        """Store new tokens [R, K, 3, H, D], and attend to all that the cache then has: [R, H, K, D], perhaps as the
        next layer reads it. They are the `chosen` ones of all tokens, which `positions` [1 or R, N, ...] belong to."""
        return self.attend_with_entropy(attn, qkv, positions, chosen)[0]

    def attend_with_entropy(
        self,
        attn: SelfAttention,
        qkv: Tensor,
        positions: Tensor | None,
        chosen: Selection | None = None,
        entropy_rows: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """`attend`, and the entropy of each query's weights, a mean over heads [R, K], of the first rows."""
        packed = None if chosen is None else chosen.as_packed
        if packed is not None and not self._stores_packed(attn, qkv, positions):
            plain = packed.padded(qkv), positions, packed.plain
            attn_out, entropy = self.attend_with_entropy(attn, *plain, entropy_rows)
            return packed.packed(attn_out.transpose(1, 2)).transpose(1, 2), entropy
        attn_out, entropy = self.attention(attn, self.update(attn, qkv, positions, chosen), packed, entropy_rows)
        if packed is not None and entropy is not None:
            entropy = packed.padded(entropy)
        return attn_out, None if entropy is None else entropy[:entropy_rows]

    def _stores_packed(self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None) -> bool:
        return self.active_rows is None and kv_store.supports(attn, qkv, positions)

    def update(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        """Store keys and values of new tokens, and return their queries [R, H, K, D]."""
        packed = None if chosen is None else chosen.as_packed
        new = qkv.shape[1] if packed is None else packed.most
        commit_lengths([self])
        kernel = packed is not None or (chosen is None and self._stores_packed(attn, qkv, positions))
        if not kernel and self.last_scale_kv is None:
            q, k, v = attn.split(qkv, select_positions(positions, chosen))
            self.append(k, v, None if chosen is None else chosen.count)
            return q
        self._diverge(chosen is not None or self.last_scale_kv is not None)
        start: int | Tensor = 0
        if self.last_scale_kv is None:  # behind the end of every row
            self.allocate(new)
            keys, values = self.k, self.v
            start = self.max_length if self.row_lengths is None else self.row_lengths
            self.max_length += new
            self.pending = new if self.row_lengths is None else 0
        else:
            keys, values = self.last_scale_kv
        assert new <= keys.shape[2], "the cache has no room"
        if packed is not None:
            self.pending_starts = packed.start
        elif self.row_lengths is not None:
            self.pending_per_row = torch.full_like(self.row_lengths, new) if chosen is None else chosen.count
        if kernel:
            return split_and_store(attn, qkv, positions, keys, values, start, packed)
        q, keys[:, :, :new], values[:, :, :new] = attn.split(qkv, select_positions(positions, chosen))
        return q

    def attention(
        self, attn: SelfAttention, q: Tensor, packed: Packed | None = None, entropy_rows: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of stored tokens, and its entropy: of the first `entropy_rows`, or of all."""
        scale, wanted, entropy = attn.softmax_scale, input_format(attn.proj), bool(entropy_rows)
        diverged = self.row_lengths is not None and self.active_rows is None and flash_attention.supports(q)
        if self.last_scale_kv is not None or packed is not None or diverged:
            # No row has more: that tells how many programs should share the keys.
            k, v = self.k[:, :, : self.max_length], self.v[:, :, : self.max_length]
            lengths = self.row_lengths, self.pending_per_row
            grown = packed is not None
            return flash_attention.attend(
                q, k, v, scale, *lengths, entropy, self.last_scale_kv, wanted, packed, grown=grown
            )
        keys, values, mask = self.view()
        if mask is None and flash_attention.supports(q) and (entropy or q.shape[2] <= MAX_KERNEL_QUERIES):
            return flash_attention.attend(q, keys, values, scale, return_entropy=entropy, input_format=wanted)
        attn_out = scaled_dot_product_attention(q, keys, values, scale, mask)
        if not entropy:
            return attn_out, None
        own = None if mask is None else mask[:entropy_rows]
        return attn_out, attention_entropy(q[:entropy_rows], keys[:entropy_rows], scale, own)


def commit_lengths(caches: Sequence[KVCache]) -> None:
    """Count what was stored last: for all layers at once, or it would be as many kernels."""
    diverged = [(c.row_lengths, c) for c in caches if c.row_lengths is not None]
    counted = [(lengths, c.pending_per_row) for lengths, c in diverged if c.pending_per_row is not None]
    if counted:
        torch._foreach_add_(*map(list, zip(*counted, strict=True)))
    packed = [(lengths, c.pending_starts) for lengths, c in diverged if c.pending_starts is not None]
    if packed:
        lengths, starts = zip(*packed, strict=True)
        torch._foreach_add_(list(lengths), list(torch.stack(starts).diff(dim=1).unbind()))
    uniform = [(c.static_lengths, c.pending) for c in caches if c.static_lengths is not None and c.pending]
    if uniform:  # all by the same number
        torch._foreach_add_([lengths for lengths, _ in uniform], uniform[0][1])
    for cache in caches:
        cache.pending_per_row, cache.pending_starts, cache.pending = None, None, 0


class EntropyRecordingCache:
    """A cache that also keeps the entropy of the attention of its first rows."""

    def __init__(self, cache: KVCache, rows: int) -> None:
        self.cache, self.rows = cache, rows
        self.entropy: Tensor

    def attend(
        self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None, chosen: Selection | None = None
    ) -> Tensor:
        attn_out, entropy = self.cache.attend_with_entropy(attn, qkv, positions, chosen, self.rows)
        assert entropy is not None
        self.entropy = entropy  # [rows, K]
        return attn_out


class BlockCausalAttention:
    """All scales at once, as in training: a token attends to its own scale and every earlier one."""

    def __init__(self, schedule: Schedule, context: int = 0) -> None:
        """`context` tokens stand in front of the first scale, and belong to it."""
        ends = [context + s.start + s.tokens for s in schedule]
        self.spans = list(zip([0, *ends], ends, strict=False))

    def attend(self, attn: SelfAttention, qkv: Tensor, positions: Tensor | None) -> Tensor:
        q, k, v = attn.split(qkv, positions)
        scale = attn.softmax_scale
        # One unmasked call per scale reads no key twice more than it must and needs no L x L mask.
        return torch.cat(
            [scaled_dot_product_attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], scale) for a, b in self.spans], dim=2
        )
