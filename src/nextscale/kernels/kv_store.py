"""Queries, keys and values of new tokens: normalized, turned to their positions, keys and values put to the cache.

The reference is `SelfAttention.split` and a copy into the cache. One pass over the numbers replaces seven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

try:
    from nextscale.kernels.triton.kv_store import split_and_store
except ImportError:  # a CPU build of torch comes without Triton
    split_and_store = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from nextscale.models.layers import SelfAttention

WIDTHS = (32, 64, 128)  # of a head


def stores(attn: SelfAttention, qkv: Tensor, positions: Tensor | None) -> bool:
    """Whether the kernel takes these. It turns adjacent pairs, as Infinity does, or halves, as HART, or nothing."""
    if split_and_store is None or not qkv.is_cuda or qkv.dtype not in (torch.bfloat16, torch.float16):
        return False
    width = qkv.shape[-1]
    # An angle of every pair, or of every channel.
    known = positions is None or positions.shape[-2] == (width // 2 if attn.pairs else width)
    return width in WIDTHS and known
