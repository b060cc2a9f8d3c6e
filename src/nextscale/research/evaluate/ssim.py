"""Structural similarity of two images (Wang et al., 2004): 11 x 11 Gaussian window, sigma 1.5."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def ssim(a: Tensor, b: Tensor, span: float = 2.0) -> Tensor:
    """Per image, [B, 3, H, W] -> [B]; `span` is the distance of black and white, 2 for [-1, 1]."""
    side = min(11, *a.shape[-2:])
    x = torch.arange(side, dtype=torch.float64, device=a.device) - (side - 1) / 2
    gauss = torch.exp(-x.square() / (2 * 1.5**2))
    window = torch.outer(gauss, gauss)
    window = (window / window.sum()).expand(a.shape[1], 1, side, side)

    def blur(x: Tensor) -> Tensor:
        return F.conv2d(x, window, groups=x.shape[1])

    a, b = a.double(), b.double()
    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    both = blur(a * b) - mean_a * mean_b
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    score = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return score.mean((1, 2, 3))
