"""Quality against the share of tokens pruned, by which of them leave first (ToProVAR, Figure 3a)."""

from __future__ import annotations

import functools
from pathlib import Path

from nextscale.methods.toprovar import ToProVAR
from nextscale.research.analyze import quality_curves
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.pruning import ORDERS, Prune
from nextscale.research.analyze.study import Study

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
LABELS = {"low": "low salience first", "high": "high salience first", "random": "random tokens"}


def measure(study: Study) -> Data:
    like = study.setting(ToProVAR)
    curves = {first: functools.partial(Prune, first=first, like=like) for first in ORDERS}
    return quality_curves.measure(study, curves, SHARES)


def draw(data: Data, path: Path) -> None:
    title = "Pruning by salience, in all layers behind the representative scale"
    quality_curves.draw(data, path, title, LABELS, "tokens pruned, of each scale")
