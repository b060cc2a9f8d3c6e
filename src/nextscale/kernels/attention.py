"""Attention over rows of different lengths that can also tell how spread it was."""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.attention import attention, blank
from nextscale.entropy import attention_entropy
from nextscale.kernels.fp8 import Reads

try:
    from nextscale.kernels.attention_triton import fused
except ImportError:  # a CPU build of torch comes without Triton
    fused = None  # type: ignore[assignment]

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
) -> tuple[Tensor, Tensor | None]:
    """q [R, H, K, D] over the first `length` + `more` [R] of the keys and values [R, H, S, D] (all of them if None).
    With a `tail`, `more` of them are the first of the keys and values [R, H, S', D] there.

    Returns what was seen [R, H, K, D] and, if asked for, the entropy of each query's weights, a mean over heads [R, K].
    What was seen may already be as the layer behind `reads` it.
    """
    if runs_on(q):
        return fused(q, k, v, scale, length, more, entropy, tail, reads)
    if tail is None:
        return reference(q, k, v, scale, length if length is None or more is None else length + more, entropy)
    mask = torch.cat((_first(k, length), _first(tail[0], more)), dim=-1)
    k, v = (blank(torch.cat(both, dim=2), mask) for both in zip((k, v), tail, strict=True))
    return _masked(q, k, v, scale, mask, entropy)


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
