"""From the logits of bits to bits: guidance, entropy and the draw, each in one pass instead of four to ten.

The references are `guidance.combine`, `entropy.token_entropy`, and in `sampling` what `sample` does without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from nextscale.kernels.triton.bit_sampling import fused_combine, fused_draw, fused_entropy
except ImportError:  # a CPU build of torch comes without Triton
    fused_combine = fused_draw = fused_entropy = None  # type: ignore[assignment]


def takes(logits: Tensor) -> bool:
    """Whether the kernels take these logits [..., d, 2]."""
    known = logits.ndim == 4 and logits.shape[-1] == 2 and logits.dtype == torch.float32
    return fused_draw is not None and logits.is_cuda and known and not torch.compiler.is_compiling()


__all__ = ["fused_combine", "fused_draw", "fused_entropy", "takes"]
