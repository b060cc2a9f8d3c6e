"""NOVA's eq. 4 to 16, with cells ranked by every layer for itself, or once per scale."""

from __future__ import annotations

import numpy as np

from .maths import Margins, Recording, resize, resize_cells, token_entropy, uniform


class Nova:
    """What NOVA decides about one image of a recorded run; scales and layers count from 0 in its tables."""

    def __init__(
        self,
        run: Recording,
        image: int,
        *,
        t_est: int,
        alpha: float,
        tau: float = 0.8,
        lam: float = 0.1,
        ratios: dict[int, float] | None = None,  # of a table, by scale: instead of eq. 11
        layer_linkage: bool = True,
        metric: str = "entropy",
        probe: str = "lens",
        first_layer: int = 0,  # layers before it use the map of the scale before, and do not count in eq. 12
        codes: int | None = None,  # of a codebook: the lens looks at so many of the likeliest ones
        unit: str = "token",
        guidance: tuple[float, ...] | None = None,  # weights, if entropies are those of the guided prediction
        most_kept: float = 1.0,
        mode: str = "bilinear",
        by_scale: bool = False,  # ranked once, by what was known before the scale
        rounds: bool = False,  # counts are the nearest ones, and may be 0
        required: float = 1.0,  # share of layers that must compute a cell; others keep their newest entropy, ...
        holds: bool = False,  # ... if this is so
    ) -> None:
        self.run, self.image, self.margins = run, image, Margins()
        self.metric, self.probe, self.first_layer = metric, probe, first_layer
        self.codes, self.unit, self.guidance, self.mode, self.linked = codes, unit, guidance, mode, layer_linkage
        self.by_scale, self.rounds, self.required, self.holds = by_scale, rounds, required, holds
        self.final: list[np.ndarray] = []  # eq. 4, [N] of every scale
        self.mean: list[float] = []  # eq. 7
        self.growth: dict[int, float] = {}
        self.star, self.eta, self.smoothed = None, None, {}
        self.ratio, self.layer_mean, self.layer_ratio = {}, {}, {}
        self.kept: dict[tuple[int, int], np.ndarray] = {}
        self.computed: dict[int, np.ndarray] = {}  # of reduced scales
        self.attention: dict[int, np.ndarray] = {}  # of the newest scale, by layer
        self.learned: list[np.ndarray] = []  # per layer, what is known of every cell of the newest scale
        for t in range(len(run.scales)):
            self.ratio[t] = self._scale_ratio(t, tau, lam, ratios)
            for layer in range(run.depth):
                self._decide(t, layer, most_kept)
            self._look(t, t_est, alpha)
            if metric == "attention":
                self._attend(t)
            if t >= t_est and probe == "previous":
                self.learned = [self._learn(t, j) for j in range(run.depth)]

    # When (eq. 8 to 10)

    def _look(self, t: int, t_est: int, alpha: float) -> None:
        """What is known when the scale is over."""
        entropy = self._entropy(self._seen(self.run.scales[t]))
        if self.ratio[t]:
            layers = sum(self.kept[t, j].astype(int) for j in range(self.run.depth))
            self.computed[t] = layers >= int(np.ceil(self.required * self.run.depth - 1e-9))
            if self.holds:
                entropy = np.where(self.computed[t], entropy, self._before(t))
        self.final.append(entropy)
        self.mean.append(float(entropy.mean()))
        g = self.growth
        if t:
            g[t] = self.mean[t] - self.mean[t - 1]
        if t == t_est - 1:
            self.eta = float(np.mean([g[k] for k in range(1, t_est)]))
        if t >= t_est:
            self.smoothed[t] = (g[t] + g[t - 1]) / 2
        if t >= t_est and self.star is None:
            if self.eta > 0:
                self.margins.of(self.smoothed[t] - alpha * self.eta)
            if self.eta <= 0 or self.smoothed[t] <= alpha * self.eta:
                self.star = t

    def _before(self, t: int) -> np.ndarray:
        """The final entropies of the scale before, on the grid of this one."""
        return resize_cells(self.final[t - 1], self.run.scales[t - 1].grid, self.run.scales[t].grid, self.mode)

    # How many (eq. 11 to 13)

    def _scale_ratio(self, t: int, tau: float, lam: float, table: dict[int, float] | None) -> float:
        if self.star is None or t <= self.star:
            return 0.0
        if table is not None:
            return table.get(t, 0.0)
        ratio = 1 / (1 + np.exp(-(t - (self.star + 1)) / tau)) - lam * np.tanh(self.growth[t - 1])
        return float(np.clip(ratio, 0, 1))

    def _decide(self, t: int, layer: int, most_kept: float) -> None:
        n, ratio = self.run.scales[t].tokens, self.ratio[t]
        if not ratio:
            return
        entropy, mean = self._layer_entropy(t, layer)
        self.layer_mean[t, layer] = mean
        if self.linked and layer > self.first_layer:
            mu = np.mean([self.layer_mean[t, j] for j in range(self.first_layer, layer)])
            ratio = ratio * (1 - (mean - mu) / mu)
        clipped = float(np.clip(ratio, 1 - most_kept, 1))
        self.layer_ratio[t, layer] = clipped
        if self.rounds:
            count = int(np.floor(n * (1 - clipped) + 0.5))
            self.margins.of(n * (1 - clipped) % 1 - 0.5)
        else:
            dropped = self.margins.floor(ratio * n) if clipped == ratio < 1 else int(np.floor(clipped * n))
            count = max(n - dropped, 1)
        self.kept[t, layer] = self.margins.keep(self._score(t, layer, entropy), count)

    # Which

    def _score(self, t: int, layer: int, entropy: np.ndarray) -> np.ndarray:
        grid = self.run.scales[t].grid
        before = self.run.scales[t - 1]
        layers = range(self.run.depth) if self.by_scale else [layer]
        if self.metric == "attention":  # attention that is spread over everything looks at nothing
            return -np.mean([resize_cells(self.attention[j], before.grid, grid, self.mode) for j in layers], axis=0)
        if self.metric == "mse":
            keys = [self._group(t - 1, j) for j in layers]
            change = [((before.outputs[key] - before.inputs[key])[self.image] ** 2).mean(-1) for key in keys]
            return resize_cells(np.mean(change, axis=0), before.grid, grid, self.mode)
        if self.metric == "random":
            return uniform(self.run.scales[t].tokens, seed=t)
        return self._before(t) if self.by_scale else entropy

    # Entropies

    def _seen(self, scale) -> np.ndarray:
        return (scale.raw if self.guidance is None else scale.guided)[self.image]

    def _entropy(self, logits: np.ndarray) -> np.ndarray:
        return token_entropy(logits, self.run.bits, self.unit)

    def _group(self, t: int, layer: int):
        return next(key for key in self.run.scales[t].inputs if key[0] == layer)

    def _lens(self, t: int, layer: int) -> np.ndarray:
        x, i = self.run.scales[t].inputs[self._group(t, layer)], self.image
        logits = self.run.lens(x[[i]], [i])[0]
        if self.guidance is not None and len(x) > self.run.images and self.guidance[t] != 1:
            other = self.run.images + i
            logits = self.guidance[t] * logits + (1 - self.guidance[t]) * self.run.lens(x[[other]], [other])[0]
        if self.codes is not None and t:
            seen = self._seen(self.run.scales[t - 1])
            p = np.exp(seen - seen.max(-1, keepdims=True))
            likely = (p / p.sum(-1, keepdims=True)).mean(0)
            best = np.sort(likely)[::-1]
            if self.codes < len(likely):
                self.margins.of((best[self.codes - 1] - best[self.codes]) / best[0])
            logits = logits[:, np.argsort(-likely)[: self.codes]]
        return self._entropy(logits)

    def _layer_entropy(self, t: int, layer: int) -> tuple[np.ndarray, float]:
        if self.probe == "previous" or layer < self.first_layer:
            map_ = self._before(t)
            known = self.probe == "previous" and self.linked and self.learned
            return map_, float((self.learned[layer] if known else map_).mean())
        found = self._lens(t, layer)
        return found, float(found.mean())

    def _learn(self, t: int, layer: int) -> np.ndarray:
        """Entropy of a layer's input; a cell that the layer did not compute keeps what was known of it."""
        seen = self._lens(t, layer)
        if (t, layer) not in self.kept:
            return seen
        before = resize_cells(self.learned[layer], self.run.scales[t - 1].grid, self.run.scales[t].grid, self.mode)
        return np.where(self.kept[t, layer], seen, before)

    def _attend(self, t: int) -> None:
        """Attention entropy of every cell; one that was not computed keeps what was known of it."""
        scale, counts = self.run.scales[t], {key: int(mask.sum()) for key, mask in self.kept.items()}
        for layer in range(self.run.depth):
            new = self.run.attention_entropy(t, layer, self.image, counts)
            if (t, layer) in self.kept:
                grid = self.run.scales[t - 1].grid
                whole = resize_cells(self.attention[layer], grid, scale.grid, self.mode)
                whole[self.kept[t, layer]] = new
                new = whole
            self.attention[layer] = new


def restored(run: Recording, t: int, key, cache: str, mode: str) -> np.ndarray:
    """Eq. 15 and 16: what every cell of scale t gets behind a layer if it is dropped there, [R, N, C]."""
    x, before, grid = run.scales[t].inputs[key], run.scales[t - 1], run.scales[t].grid
    if cache == "zero":
        return x
    if cache == "feature":
        return resize(before.outputs[key], before.grid, grid, mode)
    return x + resize(before.outputs[key] - before.inputs[key], before.grid, grid, mode)
