"""SparseVAR: which cells are out, and what stands in for them."""

from __future__ import annotations

import numpy as np

from .maths import Margins, Recording, resize, resize_cells


class Sparse:
    """One image of a recorded run; scales and blocks count from 0."""

    def __init__(
        self,
        run: Recording,
        image: int,
        *,
        first: int,  # the first sparse scale
        block: int,
        tau: float,
        anchor: int,
        similarity: float,
        mode: str = "bilinear",
    ) -> None:
        self.margins = Margins()
        self.kept: dict[int, np.ndarray] = {}
        self.source: dict[int, np.ndarray] = {}  # of every cell the one whose state it has; -1: it adds nothing
        out = change = None
        for t in range(first, len(run.scales)):
            scale, before = run.scales[t], run.scales[t - 1]
            key = next(k for k in before.inputs if k[0] == block)
            moved = ((before.outputs[key] - before.inputs[key])[image] ** 2).mean(-1)
            if t - 1 in self.kept:  # a cell that is out keeps the change that was last seen of it
                there = resize_cells(change, run.scales[t - 2].grid, before.grid, mode)
                moved = np.where(self.kept[t - 1], moved, there)
            change = moved
            map_ = resize_cells(change, before.grid, scale.grid, mode)
            low = map_ < tau * map_.max()
            if tau not in (0, 1):
                self.margins.of(np.abs(map_ / map_.max() - tau).min())
            if out is not None:
                low |= resize_cells(out.astype(float), before.grid, scale.grid, "nearest") > 0
            h, w = scale.grid
            anchors = [r * w + c for r in range(0, h, anchor) for c in range(0, w, anchor)]
            keep = ~low
            keep[anchors] = True
            self.kept[t], out = keep, low
            logits = before.raw[image].reshape(before.tokens, -1)
            self.source[t] = self._sources(resize(logits, before.grid, scale.grid, mode), keep, anchors, similarity)

    def _sources(self, logits: np.ndarray, keep: np.ndarray, anchors: list[int], similarity: float) -> np.ndarray:
        unit = logits / np.linalg.norm(logits, axis=1, keepdims=True)
        likeness = unit @ unit[anchors].T
        best = likeness.max(1)
        source = np.arange(len(keep))
        for cell in np.flatnonzero(~keep):
            self.margins.of(best[cell] - similarity)
            others = likeness[cell][likeness[cell] < best[cell] - 2e-6]  # enlarged maps repeat themselves
            self.margins.of(best[cell] - others.max() if len(others) else np.inf)
            source[cell] = anchors[int(np.argmax(likeness[cell] >= best[cell] - 2e-6))]
            if best[cell] < similarity:
                source[cell] = -1
        return source
