"""Queries, keys and values of new tokens: normalized, rotated by their positions, keys and values stored in the cache.

The reference is `SelfAttention.split` and a copy into the cache. One pass over the numbers replaces seven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from nextscale.kernels import dispatch
from nextscale.kernels.flash_attention import HEAD_DIMS
from nextscale.kernels.triton.kv_store import split_and_store

if TYPE_CHECKING:
    from nextscale.models.layers import SelfAttention


def supports(attn: SelfAttention, qkv: Tensor, positions: Tensor | None) -> bool:
    """Whether the kernel takes these. It rotates adjacent pairs, as Infinity does, or halves, as HART, or nothing."""
    if not dispatch.enabled(qkv) or qkv.dtype not in dispatch.HALF:
        return False
    head_dim = qkv.shape[-1]
    # An angle of every pair, or of every channel.
    known = positions is None or positions.shape[-2] == (head_dim // 2 if attn.pairs else head_dim)
    return head_dim in HEAD_DIMS and known


__all__ = ["split_and_store", "supports"]
