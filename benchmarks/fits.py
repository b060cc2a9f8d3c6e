"""What fits on small GPUs, as a table for docs/performance.md: `python benchmarks/fits.py`.

Computed from `Pipeline.estimate` of models without weights, on any machine.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch

from nextscale.checkpoints.families import FAMILIES
from nextscale.checkpoints.load import set_dtype
from nextscale.engine.memory import GIB, Estimate
from nextscale.kernels.fp8 import is_roundable
from nextscale.models import fp8
from nextscale.models.base import Backbone
from nextscale.models.registry import MODELS
from nextscale.pipeline import ENCODERS, Pipeline

MODEL_NAMES = (
    "var-d16",
    "var-d20",
    "var-d24",
    "var-d30",
    "var-d36",
    "hart-0.7b",
    "infinity-2b",
    "infinity-8b-512",
    "infinity-8b",
)
CARDS = (8, 12, 16, 24)  # GiB
RESERVED = 0.75  # GiB of a card that CUDA and a desktop take


def without_weights(name: str) -> Pipeline:
    spec = MODELS[name]
    family = FAMILIES[spec.family]
    with torch.device("meta"):
        backbone = family.module(spec.backbone)
        tokenizer = FAMILIES[str(family.tokenizer)].module(spec.tokenizer)
    for module in (backbone, tokenizer):
        set_dtype(module, torch.bfloat16)
    encoder = None
    if spec.text_encoder is not None:
        length = spec.backbone.text_length
        encoder = ENCODERS[spec.family](spec.text_encoder, length, dtype=torch.float16)
    return Pipeline(backbone, tokenizer, spec, encoder, progress_bar=False)


def saved_by_fp8(backbone: Backbone) -> int:
    """Bytes: a rounded weight has one instead of two."""
    rounded = 0
    with mock.patch.object(fp8, "output_rms", return_value=1.0):  # there are none
        for block in backbone.blocks:
            for part in block.modules():
                layers = [getattr(part, name) for name in fp8.input_rms(part, 1.0)]
                rounded += sum(layer.weight.numel() for layer in layers if is_roundable(layer))
    return rounded


def needs(pipe: Pipeline) -> dict[tuple[bool, bool], Estimate]:
    """Memory of an image, by (FP8, offload)."""
    saved, found = saved_by_fp8(pipe.backbone), {}
    for quantized in (False, True):
        for offload in (False, True):
            pipe.offload = "text" if offload else None
            made = pipe.estimate()
            found[quantized, offload] = dataclasses.replace(made, weights=made.weights - saved * quantized)
    return found


def table() -> str:
    lines = [
        "| model | weights | encoder | bfloat16 | `offload` | fp8 | fp8, `offload` | smallest card |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in MODEL_NAMES:
        found = needs(without_weights(name))
        plain = found[False, False]
        cells = [f"{plain.weights / GIB:.1f}", f"{plain.text_encoder / GIB:.1f}" if plain.text_encoder else "–"]
        for (_, offload), one in found.items():
            cells.append("–" if offload and not plain.text_encoder else f"{one.total / GIB:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {smallest(found)} |")
    return "\n".join(lines)


def smallest(found: dict[tuple[bool, bool], Estimate]) -> str:
    """The smallest card for the model as it is, and what it takes to do with a smaller one."""
    text, last = [], None
    for (quantized, offload), one in found.items():
        card = next((c for c in CARDS if one.total <= (c - RESERVED) * GIB), None)
        if card is not None and (last is None or card < last):
            how = " and ".join(word for word, on in (("fp8", quantized), ("`offload`", offload)) if on)
            text.append(f"{card} GB{' with ' + how if how else ''}")
            last = card
    return ", ".join(text) or "more than 24 GB"


if __name__ == "__main__":
    print(table())
