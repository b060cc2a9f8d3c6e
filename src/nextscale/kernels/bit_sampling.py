"""Guidance, entropy and the draw of bits, each in one pass over the logits instead of four to ten.

The references are `guidance.guide`, `entropy.token_entropy`, and in `sampling` what `sample` does without kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.kernels import dispatch
from nextscale.kernels.triton.bit_sampling import fused_combine, fused_draw, fused_entropy


def supports(logits: Tensor) -> bool:
    """Whether the kernels take these logits [..., d, 2]."""
    known = dispatch.enabled(logits) and logits.ndim == 4 and logits.shape[-1] == 2 and logits.dtype == torch.float32
    return known and not torch.compiler.is_compiling()


__all__ = ["fused_combine", "fused_draw", "fused_entropy", "supports"]
