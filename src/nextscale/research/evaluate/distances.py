"""How far two sets of images are apart, from their features: Fréchet distance (FID) and kernel distance (KID)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nextscale.errors import NextscaleError

ROWS = 2048  # of a kernel matrix at once


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Fréchet distance of Gaussians with the means and (unbiased) covariances of features [N, D] and [M, D].

    |mean_a - mean_b|² + tr(A) + tr(B) - 2 tr((A B)^½) (Heusel et al., 2017). It is biased: with few images it is
    too large, and much too large with fewer images than features. Compare only equal numbers of images.
    """
    a, b = _checked(a, b)
    spread_a, spread_b = _spread(a), _spread(b)
    # With A = Rᵀ R and B = Sᵀ S, the eigenvalues of (A B)^½ are the singular values of R Sᵀ: no root of a matrix that
    # is singular anyway, and so no noise of the size of its square root.
    shared = torch.linalg.svdvals(spread_a @ spread_b.T).sum()
    spreads = spread_a.square().sum() + spread_b.square().sum() - 2 * shared
    return float((a.mean(0) - b.mean(0)).square().sum() + spreads)


def kernel_distance(a: Tensor, b: Tensor) -> float:
    """KID (Bińkowski et al., 2018) of features [N, D] and [M, D]: squared MMD with the kernel (x·y / D + 1)³.

    Unbiased at every number of images, hence also negative at times; over all pairs, so that nothing is drawn.
    """
    a, b = _checked(a, b)
    n, m = len(a), len(b)
    return _kernels(a) / (n * (n - 1)) + _kernels(b) / (m * (m - 1)) - 2 * _kernels(a, b) / (n * m)


def _spread(x: Tensor) -> Tensor:
    """R [min(N, D), D] with Rᵀ R = the covariance of x."""
    return torch.linalg.qr((x - x.mean(0)) / math.sqrt(len(x) - 1), mode="r").R


def _kernels(a: Tensor, b: Tensor | None = None) -> float:
    """Sum of the kernel over all pairs; within one set, over all pairs of different images."""
    others = a if b is None else b
    total = sum(float((rows @ others.T / a.shape[1] + 1).pow(3).sum()) for rows in a.split(ROWS))
    return total if b is not None else total - float((a.square().sum(1) / a.shape[1] + 1).pow(3).sum())


def _checked(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise NextscaleError(f"features must be [N, D] and [M, D], not {list(a.shape)} and {list(b.shape)}")
    if min(len(a), len(b)) < 2:
        raise NextscaleError(f"a distance of two sets needs two images in each, not {len(a)} and {len(b)}")
    if not (a.isfinite().all() and b.isfinite().all()):
        raise NextscaleError("the features are not finite")
    return a.double(), b.double()
