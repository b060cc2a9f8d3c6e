"""Attention over rows of different lengths that can also tell how spread it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.engine.entropy import attention_entropy
from nextscale.kernels.fp8 import Reads
from nextscale.kernels.sdpa import attention, blank

try:
    from nextscale.kernels.triton.attention import fused
except ImportError:  # a CPU build of torch comes without Triton
    fused = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed

WIDTHS = (32, 64, 128)  # of a head


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None = None,
    more: Tensor | None = None,
    entropy: bool = False,
    tail: tuple[Tensor, Tensor] | None = None,
    reads: Reads | None = None,
    chosen: Packed | None = None,
    grown: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """q [R, H, K, D] over the first `length` + `more` [R] of the keys and values [R, H, S, D] (all of them if None).
    With a `tail`, `more` of them are the first of the keys and values [R, H, S', D] there.

    Returns what was seen [R, H, K, D] and, if asked for, the entropy of each query's weights, a mean over heads [R, K].
    What was seen may already be as the layer behind `reads` it.

    Queries may be the `chosen` ones and lie packed, [1, H, T, D]; then results are [1, H, T, D] and [1, T], and those
    behind the last query are nobody's. Instead of `more` they say whether the keys have `grown` by as many as a row has
    queries: it has where they are its own, but not a text.
    """
    assert chosen is None or more is None, "packed queries know how many they are"
    assert chosen is not None or not grown, "only packed queries know how many they are"
    assert tail is None or grown or more is not None, "how much of the tail is there?"
    assert length is not None or (more is None and not grown), "more than how many?"
    if runs_on(q):
        return fused(q, k, v, scale, length, more, entropy, tail, reads, chosen, grown)
    if chosen is not None:
        more = chosen.count if grown else None
        q = chosen.padded(q.transpose(1, 2)).transpose(1, 2)
    mask = None if length is None else _first(k, length if more is None or tail is not None else length + more)
    if tail is not None:
        assert mask is not None
        mask = torch.cat((mask, _first(tail[0], more)), dim=-1)
        k, v = (torch.cat(both, dim=2) for both in zip((k, v), tail, strict=True))
    if mask is not None:
        k, v = blank(k, mask), blank(v, mask)
    seen, spread = _masked(q, k, v, scale, mask, entropy)
    if chosen is None:
        return seen, spread
    return chosen.packed(seen.transpose(1, 2)).transpose(1, 2), None if spread is None else chosen.packed(spread)


def runs_on(q: Tensor) -> bool:
    """Whether the kernel takes these queries. Float32 would lose the digits that it is asked for."""
    known = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in WIDTHS
    return fused is not None and q.is_cuda and known and not torch.compiler.is_compiling()


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, length: Tensor | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    return _masked(q, k, v, scale, None if length is None else _first(k, length), entropy)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    return attention(q, k, v, scale, mask), attention_entropy(q, k, scale, mask) if entropy else None


def _first(k: Tensor, length: Tensor | None) -> Tensor:
    """Which keys [R, H, S, D] are among the first `length` [R] of their row, [R, 1, 1, S]."""
    assert length is not None
    return (torch.arange(k.shape[2], device=k.device) < length[:, None])[:, None, None]
