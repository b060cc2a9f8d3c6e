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
    exit_blocks,
    exit_measures,
    flops_over_size,
    global_layers,
    image_change,
    kept_maps,
    layer_maps,
    layer_roles,
    memory_per_scale,
    restored_codes,
    saliency,
    scale_depth,
    shares,
    spectra,
    token_spectra,
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
    by_name: bool = False  # many runs: drawn only when asked for
    table: Callable[[Data], list[str]] | None = None  # lines for the terminal


_ALL = (
    Figure(
        "memory",
        "Memory per scale",
        "NOVA, Figure 2a",
        "What one guided image needs besides the weights: the KV cache, which grows with every scale, and what a scale "
        "computes with.",
        memory_per_scale.measure,
        memory_per_scale.draw,
    ),
    Figure(
        "flops",
        "Arithmetic over the size of the image",
        "NOVA, Figure 2b",
        "FLOPs of the same transformer when it predicts the image scale by scale, and token by token in raster order. "
        "The scales before the last one are what next-scale prediction adds.",
        lambda s: flops_over_size.measure(s.pipe, s.pipe.schedule(**s.size)),
        flops_over_size.draw,
    ),
    Figure(
        "entropy",
        "Entropy per scale",
        "NOVA, Figure 4b",
        "Mean entropy of a token at every scale, of the raw conditional prediction and after temperature and guidance. "
        "The band is that of all images, the dashed line the prompt of this page. NOVA waits until it stops growing.",
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
        "token_spectra",
        "Frequency spectra of the token maps",
        "NOVA, Figure 4a",
        "Spectra of the maps that all codes so far add up to, and of the codes of each scale alone; a flat curve is "
        "white noise.",
        lambda s: token_spectra.measure(s.watched),
        token_spectra.draw,
    ),
    Figure(
        "activation",
        "First reduced scale",
        "NOVA, Figure 8",
        "The share of images, per category of prompts, for which NOVA begins to reduce at each scale.",
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
    Figure(
        "saliency",
        "Quality by the salience of pruned tokens",
        "ToProVAR, Figure 3a",
        "Quality against the share of tokens pruned from all scales behind the representative one, when those of low "
        "salience (high attention entropy) leave first, those of high salience, or any.",
        saliency.measure,
        saliency.draw,
        by_name=True,
    ),
    Figure(
        "layer_roles",
        "Quality by the layers that are pruned",
        "ToProVAR, Figure 3b",
        "Quality against the share of tokens pruned from half of the layers: the more global half, the other, or every "
        "second layer.",
        layer_roles.measure,
        layer_roles.draw,
        by_name=True,
    ),
    Figure(
        "scale_depth",
        "When an image is complete",
        "ToProVAR, Figure 3c",
        "SSIM of the image decoded after each scale to the final one, with the middle 80 % of the images, per category "
        "of prompts.",
        scale_depth.measure,
        scale_depth.draw,
        by_name=True,
    ),
    Figure(
        "exit_measures",
        "Measures of what can be excluded",
        "SparseVAR, Figure 6",
        "Three measures of how much a cell still changes, as maps, and the quality when the cells that are lowest in "
        "them are excluded, at equal shares.",
        exit_measures.measure,
        exit_measures.draw,
        by_name=True,
    ),
    Figure(
        "exit_blocks",
        "Blocks that tell what can be excluded",
        "SparseVAR, Figure 8",
        "What single blocks change, and the quality when the cells that this block changes least are excluded, at an "
        "equal share. `nextscale calibrate sparsevar` chooses by the same comparison.",
        exit_blocks.measure,
        exit_blocks.draw,
        by_name=True,
    ),
    Figure(
        "restored",
        "Sampling from restored states",
        "NOVA, equations 15 and 16",
        "Half of the cells of one scale are dropped, restored from the scale before, and sampled: how many of their "
        "bits (or codes) are those of the plain run, how many those of the scale before, and how far their logits are "
        "from the computed ones.",
        restored_codes.measure,
        restored_codes.draw,
        by_name=True,
        table=restored_codes.table,
    ),
    Figure(
        "shares",
        "Where the budget goes",
        "a method of this package, Taper",
        "The share of cells that Taper keeps of every scale, and what the scales cost. The dotted line is what was "
        "planned; with entropies of the model an image takes what it needs, and the band holds all images.",
        shares.measure,
        shares.draw,
        by_name=True,
    ),
)
EXAMPLE, EXAMPLE_LABEL = "two foxes above a blue heart", 0  # of whoever names a figure and no prompt
FIGURES = {figure.name: figure for figure in _ALL}


def get_figures(text: str | None) -> list[Figure]:
    """Look up names separated by commas; None = those that cost a run or two, "all" = all."""
    if text is None:
        return [figure for figure in FIGURES.values() if not figure.by_name]
    names = [name for part in text.split(",") for name in (FIGURES if part.strip() == "all" else [part.strip()])]
    for name in names:
        if name not in FIGURES:
            raise NextscaleError(f"unknown figure {name!r}; allowed: {choices(FIGURES)}, or all")
    return [FIGURES[name] for name in dict.fromkeys(names)]
