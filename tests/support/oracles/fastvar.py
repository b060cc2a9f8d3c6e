"""FastVAR, as its public code does it."""

from __future__ import annotations

import numpy as np

from .maths import Margins, Recording, resize


class Fast:
    """All rows of a recorded run: every row and every sub-layer selects for itself."""

    def __init__(self, run: Recording, *, ratios: dict[int, float], layers: range) -> None:
        self.margins = Margins()
        self.kept: dict[tuple, np.ndarray] = {}  # scale, layer, parts -> [R, N]
        self.filled: dict[tuple, np.ndarray] = {}  # what a dropped cell gets, [R, N, C]
        cached = run.scales[min(ratios) - 1]
        for t, ratio in ratios.items():
            scale = run.scales[t]
            for key, x in scale.inputs.items():
                if key[0] not in layers or ratio >= 1:
                    continue
                score = ((x - x.mean(1, keepdims=True)) ** 2).sum(-1)
                count = scale.tokens - int(scale.tokens * ratio)
                self.kept[(t, *key)] = np.stack([self.margins.keep(row, count) for row in score])
                added = cached.outputs[key] - cached.inputs[key]
                self.filled[(t, *key)] = x + resize(added, cached.grid, scale.grid, "area")
