"""Fewer bits for the weights of blocks."""

from __future__ import annotations

import torch
from torch import nn

from nextscale.errors import NextscaleError, choices
from nextscale.kernels.fp8 import OLDEST, FP8Linear, fits
from nextscale.models.base import Backbone

KINDS = ("fp8",)
LAYERS = ("qkv", "proj", "q", "fc1", "fc2", "gate", "up", "down")  # the large ones; text is read once, heads decide


def check_quantize(kind: str | None, device: torch.device) -> None:
    if kind is None:
        return
    if kind not in KINDS:
        raise NextscaleError(f"unknown quantize {kind!r}; allowed: {choices(KINDS)}")
    if device.type != "cuda":
        raise NextscaleError(f"quantize='fp8' needs a CUDA GPU, not {device.type}")
    if torch.cuda.get_device_capability(device) < OLDEST:
        raise NextscaleError(
            f"quantize='fp8' needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer (Ada, Hopper)"
        )


@torch.no_grad()
def to_fp8(backbone: Backbone) -> None:
    """In place. The old weights are let go of one by one."""
    if backbone.dtype not in (torch.bfloat16, torch.float16):
        raise NextscaleError(f"quantize='fp8' needs dtype bfloat16 or float16, not {backbone.dtype}")
    for block in backbone.blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if name in LAYERS and isinstance(layer, nn.Linear) and fits(layer):
                    setattr(parent, name, FP8Linear(layer))
