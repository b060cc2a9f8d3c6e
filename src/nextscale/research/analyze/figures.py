"""The figures by name: what each one shows, which figure of which paper it answers to, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nextscale.errors import NextscaleError, choices
from nextscale.methods import NOVA, ToProVAR
from nextscale.research.analyze import (
    activation_scale,
    block_change,
    entropy_curve,
    entropy_maps,
    global_layers,
    image_change,
    kept_maps,
    layer_maps,
    spectra,
)
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.study import Study


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    paper: str
    caption: str
    measure: Callable[[Study], Data]
    draw: Callable[[Data, Path], None]
    runs_methods: bool = False
    needs_nova: bool = False  # its rule must fit the schedule


_ALL = (
    Figure(
        "entropy",
        "Entropy per scale",
        "NOVA, Figure 4b",
        "Mean entropy of a token at every scale, of the raw conditional prediction and after temperature and guidance. "
        "The band is that of all prompts, the dashed line the prompt of this page. NOVA waits until it stops growing.",
        lambda s: entropy_curve.measure(s.band, s.watched),
        entropy_curve.draw,
    ),
    Figure(
        "heatmaps",
        "Entropy maps per scale",
        "NOVA, Figure 3",
        "Above, the image decoded after each scale; below, how uncertain the model was about each of its tokens "
        "(conditional prediction, one color scale for all maps).",
        lambda s: entropy_maps.measure(s.watched),
        entropy_maps.draw,
    ),
    Figure(
        "layers",
        "Entropy maps per layer",
        "NOVA, Figure 4c",
        "The entropy that the model's own head sees in the input of every layer, as maps of one late scale and as "
        "means of several scales. NOVA keeps more tokens in layers that are less certain than those before them.",
        lambda s: layer_maps.measure(s.watched),
        layer_maps.draw,
    ),
    Figure(
        "spectra",
        "Frequency spectra per scale",
        "NOVA, Figure 4a",
        "Amplitude spectrum of the image decoded after every scale (center = low frequencies), and its mean over "
        "circles.",
        lambda s: spectra.measure(s.watched),
        spectra.draw,
    ),
    Figure(
        "activation",
        "First reduced scale",
        "NOVA, Figure 8",
        "The share of prompts, per category, for which NOVA begins to reduce at each scale.",
        lambda s: activation_scale.measure(s.band, s.setting(NOVA)),
        activation_scale.draw,
        needs_nova=True,
    ),
    Figure(
        "attention",
        "Global and detail layers",
        "ToProVAR, Figure 3",
        "Maps of every layer's attention entropy and the ratio of their first two singular values. One dominant "
        "direction makes a layer global, which ToProVAR keeps; the others are thinned.",
        lambda s: global_layers.measure(s.watched, s.setting(ToProVAR)),
        global_layers.draw,
    ),
    Figure(
        "kept",
        "Kept tokens per method",
        "ToProVAR and SparseVAR, Figure 7 of each",
        "The share of layers in which each method computed each cell of the last scales; the rest was filled in.",
        lambda s: kept_maps.measure(s.outputs, s.prompt),
        kept_maps.draw,
        runs_methods=True,
    ),
    Figure(
        "change",
        "Change of the image per scale",
        "SparseVAR, Figure 2",
        "What the last scales change in the decoded image: flat regions stay as they are.",
        lambda s: image_change.measure(s.watched),
        image_change.draw,
    ),
    Figure(
        "blocks",
        "Change of the features per block",
        "SparseVAR, Figure 3",
        "How much single blocks change the hidden state of each cell, relative to the largest change of the map. "
        "SparseVAR picks its cells by one such map.",
        lambda s: block_change.measure(s.watched),
        block_change.draw,
    ),
)
FIGURES = {figure.name: figure for figure in _ALL}


def get_figures(text: str | None) -> list[Figure]:
    """Look up names separated by commas; None = all figures."""
    names = list(FIGURES) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FIGURES:
            raise NextscaleError(f"unknown figure {name!r}; allowed: {choices(FIGURES)}")
    return [FIGURES[name] for name in dict.fromkeys(names)]
