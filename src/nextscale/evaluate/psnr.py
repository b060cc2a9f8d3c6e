"""Peak signal-to-noise ratio."""

from __future__ import annotations

from torch import Tensor


def psnr(a: Tensor, b: Tensor, span: float = 2.0) -> Tensor:
    """Decibels per image of pictures [B, 3, H, W] whose values span `span`; equal pictures have 120 and more."""
    return -10 * (a - b).div(span).square().mean((1, 2, 3)).clamp_min(1e-12).log10()
