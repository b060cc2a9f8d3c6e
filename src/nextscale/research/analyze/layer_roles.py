"""Quality against the share of tokens pruned from global layers alone, or from detail layers (ToProVAR, Figure 3b)."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from nextscale.methods.toprovar import ToProVAR
from nextscale.research.analyze import global_layers, quality_curves
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.pruning import Prune
from nextscale.research.analyze.study import Study

SHARES = (0.3, 0.5, 0.7, 0.9)


def measure(study: Study) -> Data:
    """Prune as many global layers as detail layers: the halves of highest and of lowest ratio of singular values; and
    every second layer, for where a layer lies matters, too."""
    like = study.setting(ToProVAR)
    layers = split(global_layers.measure(study.watched, like)["ratios"])
    curves = {name: functools.partial(Prune, layers=some, like=like) for name, some in layers.items()}
    return {**quality_curves.measure(study, curves, SHARES), "layers": {n: list(some) for n, some in layers.items()}}


def split(ratios: list[float]) -> dict[str, tuple[int, ...]]:
    """Layers, from 1, by the ratio of the first to the second singular value of their map."""
    half = max(len(ratios) // 2, 1)
    order = [int(j) + 1 for j in np.argsort(ratios, kind="stable")]
    every_second = range(2, len(ratios) + 1, 2) if len(ratios) > 1 else (1,)
    return {
        "global": tuple(sorted(order[-half:])),
        "detail": tuple(sorted(order[:half])),
        "second": tuple(every_second),
    }


def draw(data: Data, path: Path) -> None:
    def named(name: str) -> str:
        return ", ".join(str(j) for j in data["layers"][name])

    labels = {"second": "every second layer"}
    labels |= {name: f"{name} layers ({named(name)})" for name in ("global", "detail")}
    title = "Pruning half of the layers, tokens of low salience first, behind the representative scale"
    quality_curves.draw(data, path, title, labels, "tokens pruned, of each of these layers")
