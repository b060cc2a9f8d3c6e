"""The formulas that several methods share, on float64 arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Grid = tuple[int, int]


@dataclass
class Scale:
    """What was seen of one scale. Rows: the conditional ones of all images, then the unconditional ones."""

    grid: Grid
    inputs: dict = field(default_factory=dict)  # (layer, parts) -> [R, N, C]
    outputs: dict = field(default_factory=dict)  # the same, behind the layer, holes filled
    queries: dict = field(default_factory=dict)  # layer -> [R, H, K, D], in raster order, padded at the end
    keys: dict = field(default_factory=dict)
    raw: np.ndarray | None = None  # logits of every row
    guided: np.ndarray | None = None  # logits of every image, after guidance
    completed: np.ndarray | None = None  # the state that the head sees, [R, N, C]
    weight: np.ndarray | None = None  # 0: the cell adds nothing; None = 1 everywhere
    features: np.ndarray | None = None  # the map with this scale in it, [B, d, H, W]

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass
class Recording:
    scales: list[Scale]
    depth: int
    images: int
    bits: bool
    softmax_scale: float
    head: dict  # weight, bias, eps, rms, and per row: scale, shift
    context: int = 0  # tokens in front of the first scale
    previews: list = field(default_factory=list)  # (maps given to the decoder, images)

    def keys_seen(self, t: int, layer: int, image: int, kept: dict) -> np.ndarray:
        """Keys [H, S, D] that scale t sees: of every scale so far those of the kept cells; `kept` counts them."""
        parts = []
        for k in range(t + 1):
            stop = kept.get((k, layer), self.scales[k].tokens) + (0 if k else self.context)
            parts.append(self.scales[k].keys[layer][image, :, :stop])
        return np.concatenate(parts, axis=1)

    def attention_entropy(self, t: int, layer: int, image: int, kept: dict) -> np.ndarray:
        """Of the kept cells of scale t, [K], mean over heads."""
        stop = kept.get((t, layer), self.scales[t].tokens) + (0 if t else self.context)
        q = self.scales[t].queries[layer][image, :, :stop]
        scores = q @ self.keys_seen(t, layer, image, kept).transpose(0, 2, 1) * self.softmax_scale
        return entropy(scores).mean(0)[0 if t else self.context :]

    def lens(self, x: np.ndarray, rows: slice | list) -> np.ndarray:
        """Logits [rows, N, V] of states between two layers: the model's own last norm and head."""
        h = self.head
        y = x if h["rms"] else x - x.mean(-1, keepdims=True)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + h["eps"])
        y = y * h["gain"] * (1 + h["scale"][rows]) + h["shift"][rows]
        logits = y @ h["weight"].T + h["bias"]
        return logits.reshape(*logits.shape[:-1], -1, 2) if self.bits else logits


def entropy(logits: np.ndarray) -> np.ndarray:
    """-sum p log p of softmax(logits) over the last axis."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(-1)


def token_entropy(logits: np.ndarray, bits: bool, unit: str = "token") -> np.ndarray:
    """[..., N, V] or, for bits, [..., N, d, 2] -> [..., N]."""
    each = entropy(logits)
    if not bits:
        return each
    return each.mean(-1) if unit == "bit" else each.sum(-1)


def _axis(n: int, to: int, mode: str) -> np.ndarray:
    """How each of `to` cells is made of `n` cells along one side, [to, n]."""
    w = np.zeros((to, n))
    for i in range(to):
        if mode == "nearest":
            w[i, i * n // to] = 1
        elif mode == "area":  # the mean of all cells that the new one touches
            first, last = i * n // to, -(-(i + 1) * n // to)
            w[i, first:last] = 1 / (last - first)
        else:
            at = (i + 0.5) * n / to - 0.5
            if mode == "bilinear":
                at = max(at, 0.0)
                taps = {0: 1 - (at - np.floor(at)), 1: at - np.floor(at)}
            else:
                taps = {k: _cubic(abs(at - np.floor(at) - k)) for k in (-1, 0, 1, 2)}
            for k, share in taps.items():
                w[i, min(max(int(np.floor(at)) + k, 0), n - 1)] += share
    return w


def _cubic(d: float, a: float = -0.75) -> float:
    """Keys' kernel."""
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def resize(maps: np.ndarray, grid: Grid, to: Grid, mode: str) -> np.ndarray:
    """Maps [..., N, C] of one grid on another."""
    if grid == to:
        return maps
    m = maps.reshape(*maps.shape[:-2], *grid, maps.shape[-1])
    m = np.einsum("ih,...hwc,jw->...ijc", _axis(grid[0], to[0], mode), m, _axis(grid[1], to[1], mode))
    return m.reshape(*maps.shape[:-2], to[0] * to[1], maps.shape[-1])


def resize_cells(values: np.ndarray, grid: Grid, to: Grid, mode: str) -> np.ndarray:
    """The same for one number per cell, [..., N]."""
    return resize(values[..., None], grid, to, mode)[..., 0]


def highest(score: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """The `count` cells of highest score as a mask [N], of equal ones the earlier; and by how much they win."""
    score = np.round(score, 9)  # what was copied from one cell is equal, however it was rounded
    order = np.argsort(-score, kind="stable")
    mask = np.zeros(len(score), dtype=bool)
    mask[order[:count]] = True
    if not 0 < count < len(score):
        return mask, np.inf
    gap = score[order[count - 1]] - score[order[count]]
    return mask, gap if gap else np.inf


def uniform(n: int, seed: int) -> np.ndarray:
    """What torch's generator of that seed draws first: 24 bits of each number of the Mersenne twister."""
    numbers = np.random.RandomState(seed).randint(0, 2**32, size=n, dtype=np.uint32)
    return (numbers & (2**24 - 1)) / 2**24


class Margins:
    """How clear the decisions of an oracle were: rounding must not be what decides."""

    def __init__(self) -> None:
        self.smallest = np.inf

    def of(self, distance: float) -> None:
        self.smallest = min(self.smallest, abs(float(distance)))

    def floor(self, value: float) -> int:
        self.of(value - round(value) if value else np.inf)
        return int(np.floor(value))

    def keep(self, score: np.ndarray, count: int) -> np.ndarray:
        mask, gap = highest(score, count)
        self.of(gap / max(np.ptp(score), 1e-12))
        return mask
