"""Scaled dot-product attention, in one place so that a faster backend is a change of one line."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """q [R, H, K, D] over k, v [R, H, S, D]; `mask` is True where a key may be seen."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
