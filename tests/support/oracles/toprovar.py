"""ToProVAR's eq. 2 to 6."""

from __future__ import annotations

import numpy as np

from .maths import Margins, Recording, resize_cells, uniform


class Topro:
    """What ToProVAR decides about one image of a recorded run; scales and layers count from 0 in its tables."""

    def __init__(
        self,
        run: Recording,
        image: int,
        *,
        representative: int,  # the scale at which layers are told apart
        tau: float,
        beta: float = 1.0,
        a_min: float = 0.0,
        a_max: float = 0.7,
        center: bool = True,
        previous_layer: bool = False,
        starts: bool = True,  # False: right after the representative scale
        by_layer: bool = True,
        by_token: bool = True,
        mode: str = "nearest",
    ) -> None:
        self.run, self.image, self.mode, self.margins = run, image, mode, Margins()
        self.previous_layer = previous_layer
        self.maps: dict[int, np.ndarray] = {}  # of the newest scale at which the layer's entropy is known
        self.grids: dict[int, tuple[int, int]] = {}
        self.kept: dict[tuple[int, int], np.ndarray] = {}
        self.rho: list[float] = []
        self.first: int | None = None if starts else representative + 1
        total = len(run.scales)
        for t, scale in enumerate(run.scales):
            last = t == total - 1
            for layer in range(run.depth):
                if self.first is not None and t >= self.first:
                    h = self._known(layer, scale.grid)
                    h = h / h.mean() if by_token else np.ones_like(h)
                    q = (t + 1) / total * (self.detail[layer] if by_layer else 1.0) * h  # eq. 5
                    stay = 1 - np.clip(a_min + (a_max - a_min) * q, 0, 1)  # eq. 6
                    self.margins.of(stay.sum() % 1 - 0.5)
                    count = int(np.round(stay.sum()))
                    score = -q if by_token else uniform(scale.tokens, seed=scale.tokens)
                    self.kept[t, layer] = self.margins.keep(score, count)
                if not last:  # nobody will ask for those of the last scale
                    self._learn(t, layer)
            if last:
                return
            mean = np.mean([self.maps[layer] for layer in range(run.depth)], axis=0)
            self.rho.append(float((mean < mean.mean() - 1e-9).mean()))  # eq. 3
            if t == representative:
                self.detail = [self._detail(self.maps[j].reshape(scale.grid), beta, center) for j in range(run.depth)]
            if self.first is None and t >= representative:
                self.margins.of(self.rho[t] - tau)
                self.margins.of(np.abs(mean - mean.mean()).min() / np.ptp(mean))
                self.first = t + 1 if self.rho[t] >= tau else None

    def _known(self, layer: int, grid: tuple[int, int]) -> np.ndarray:
        source = max(layer - 1, 0) if self.previous_layer else layer
        return resize_cells(self.maps[source], self.grids[source], grid, self.mode)

    def _learn(self, t: int, layer: int) -> None:
        """Eq. 2 for the cells that the layer computed; the others keep what was known of them."""
        counts = {key: int(mask.sum()) for key, mask in self.kept.items()}
        new = self.run.attention_entropy(t, layer, self.image, counts)
        grid = self.run.scales[t].grid
        if (t, layer) in self.kept:
            whole = resize_cells(self.maps[layer], self.grids[layer], grid, self.mode)
            whole[self.kept[t, layer]] = new
            new = whole
        self.maps[layer], self.grids[layer] = new, grid

    def _detail(self, map_: np.ndarray, beta: float, center: bool) -> float:
        """Eq. 4: near 1 for a detail layer, near 0 for a global one."""
        values = np.linalg.svd(map_ - map_.mean() if center else map_, compute_uv=False)
        return float(np.exp(-beta * (values[0] / values[1] - 1)))
