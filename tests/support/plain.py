"""References of the kernels in plain numpy and float64, without the package or torch's own layers."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def plain(x: Tensor) -> Array:
    return x.detach().cpu().double().numpy()


def close(found: Tensor, exact: Array, atol: float = 2e-5) -> None:
    """Equal in shape, without unexpected NaN, and within float32's rounding by default."""
    assert tuple(found.shape) == exact.shape
    np.testing.assert_allclose(plain(found), exact, rtol=atol, atol=atol)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, length: list[int] | None = None) -> tuple[Array, Array]:
    """Attention of q [R, H, K, D] to the first keys [R, H, S, D], and the entropy of its weights, a mean over heads."""
    output, entropy = np.empty(q.shape), np.empty((q.shape[0], q.shape[2]))
    for row in range(len(q)):
        n = k.shape[2] if length is None else length[row]
        scores = plain(q[row]) @ plain(k[row, :, :n]).transpose(0, 2, 1) * scale
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        output[row] = p @ plain(v[row, :, :n])
        entropy[row] = -(p * np.log(np.maximum(p, 1e-300))).sum(-1).mean(0)
    return output, entropy


def cosine(x: Array, log_scale: Array | None = None, positions: Array | None = None) -> Array:
    """x [H, K, D] with a length of 1, or of exp(log_scale) [H] and at most 100; turned in `pairs` if there are
    positions."""
    x = x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-12)
    if log_scale is not None:
        x = x * np.minimum(np.exp(log_scale), 100.0)[:, None, None]
    return x if positions is None else pairs(x, positions)


def pairs(x: Array, positions: Array) -> Array:
    """Adjacent pairs of x [H, K, D] turned by the angles whose (cos, sin) are positions [K, D/2, 2]."""
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * (positions[..., 0] + 1j * positions[..., 1])
    return np.stack((turned.real, turned.imag), -1).reshape(x.shape)


def halves(x: Array, positions: Array) -> Array:
    """Channels i and i + D/2 of x [H, K, D] turned, each by the angle of its own in positions [K, D, 2]."""
    half = x.shape[-1] // 2
    turned = np.empty_like(x)
    for i in range(x.shape[-1]):
        other = -x[..., i + half] if i < half else x[..., i - half]
        turned[..., i] = x[..., i] * positions[:, i, 0] + other * positions[:, i, 1]
    return turned


def highest(score: Tensor, count: int) -> list[int]:
    """Cells of highest score [N] in raster order, of equal ones the earlier."""
    return sorted(sorted(range(len(score)), key=lambda i: (-score[i].item(), i))[:count])


def resized(x: Array, grid: tuple[int, int], mode: str = "bilinear") -> Array:
    """Maps [..., h, w] on another grid: a matrix for the rows, and one for the columns."""
    return _between(x.shape[-2], grid[0], mode) @ x @ _between(x.shape[-1], grid[1], mode).T


def _between(old: int, new: int, mode: str) -> Array:
    matrix = np.zeros((new, old))
    for i in range(new):
        if mode == "nearest":
            matrix[i, i * old // new] = 1
            continue
        at = min(max((i + 0.5) * old / new - 0.5, 0), old - 1)
        matrix[i, int(at)] += 1 - at % 1
        matrix[i, min(int(at) + 1, old - 1)] += at % 1
    return matrix


def resized_tokens(x: Tensor, grids: tuple[tuple[int, int], tuple[int, int]], mode: str) -> Array:
    """Tokens [R, h w, C] of the first grid on the second one."""
    old, new = grids
    maps = plain(x).transpose(0, 2, 1).reshape(len(x), x.shape[2], *old)
    return resized(maps, new, mode).reshape(len(x), x.shape[2], -1).transpose(0, 2, 1)


def folded(tokens: Array, grid: tuple[int, int], patch: int) -> Array:
    """Tokens [B, h w, d patch^2] as maps [B, d, h patch, w patch]."""
    h, w = grid
    x = tokens.reshape(len(tokens), h, w, -1, patch, patch)
    return x.transpose(0, 3, 1, 4, 2, 5).reshape(len(x), -1, h * patch, w * patch)


def unfolded(maps: Array, patch: int) -> Array:
    batch, d, height, width = maps.shape
    x = maps.reshape(batch, d, height // patch, patch, width // patch, patch).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, -1, d * patch**2)


def layer_norm(x: Array, eps: float, rms: bool = False) -> Array:
    x = x if rms else x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def group_norm(x: Array, norm: torch.nn.GroupNorm, silu: bool) -> Array:
    """Of maps [B, C, H, W]."""
    y = layer_norm(x.reshape(len(x), norm.num_groups, -1), norm.eps).reshape(x.shape)
    y = y * plain(norm.weight)[:, None, None] + plain(norm.bias)[:, None, None]
    return y * sigmoid(y) if silu else y


def conv(x: Array, weight: Array) -> Array:
    """Of maps [B, C, H, W] with weights [out, C, 3, 3] and zeros around the maps."""
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    taps = [(i, j) for i in range(3) for j in range(3)]
    return sum(
        np.einsum("bchw,oc->bohw", padded[:, :, i : i + height, j : j + width], weight[:, :, i, j], optimize=True)
        for i, j in taps
    )


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def gelu(z: Array) -> Array:
    return z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def bit_entropy(z: Array) -> Array:
    """Of a bit that is 1 with the probability sigmoid(z)."""
    one = sigmoid(z)
    return -(one * np.log(np.maximum(one, 1e-300)) + (1 - one) * np.log(np.maximum(sigmoid(-z), 1e-300)))


def close_fp8(found: Tensor, exact: Array) -> None:
    """Equal up to the rounding of FP8 (e4m3): three bits behind the first one, and too large numbers are the largest.

    Triton's interpreter loses the carry of a number that is rounded up to a power of two, so these are not looked at;
    it cuts those below 2^-6, which may be off by one; and it forgets NaN.
    """
    assert found.dtype == torch.float8_e4m3fn
    known = np.clip(np.where(np.isnan(exact), 0, exact), -448, 448)
    output = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(known), 2.0**-6))) - 3)
    right = np.round(known / output) * output
    carried = (np.abs(right) > np.abs(known)) & (np.log2(np.maximum(np.abs(right), 2.0**-10)) % 1 == 0)
    # A number in float32 may lie on the other side of the middle of two.
    middle = np.abs(known / output % 1 - 0.5) < 0.01
    checked = ~carried & ~middle & ~np.isnan(exact)
    assert checked.mean() > 0.5 or checked.size < 10
    good = np.abs(plain(found.float()) - right) <= np.where(np.abs(known) < 2.0**-6, 2.0**-9, 0)
    assert good[checked].all()
