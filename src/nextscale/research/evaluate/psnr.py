"""Peak signal-to-noise ratio."""

from __future__ import annotations

from torch import Tensor

# Decibels of equal images, and the most that any have: it would be infinite, which JSON cannot say, and without a
# limit a few equal images would outweigh all others in a mean. Nobody sees a difference at 60.
EQUAL = 60.0


def psnr(a: Tensor, b: Tensor, span: float = 2.0) -> Tensor:
    """Decibels per image of images [B, 3, H, W] whose values span `span`, at most `EQUAL`."""
    return (-10 * (a - b).div(span).square().mean((1, 2, 3)).log10()).clamp_max(EQUAL)
