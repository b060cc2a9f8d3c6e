"""Fewer bits for the weights of blocks, and of a decoder's."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nextscale.errors import NextscaleError
from nextscale.io.arguments import read_choice
from nextscale.io.devices import name_of
from nextscale.kernels.conv import new_enough, takes
from nextscale.kernels.fp8 import OLDEST, FP8Conv, FP8Layer, FP8Linear, fits
from nextscale.models.base import Backbone
from nextscale.models.hart import GatedMLP
from nextscale.models.infinity import Infinity, TextAttention
from nextscale.models.layers import MLP, SelfAttention
from nextscale.tokenizers.autoencoder import ResidualBlock
from nextscale.tokenizers.base import ImageTokenizer

KINDS = ("fp8",)
PASSED = 0.5  # of the size of its input is left by GELU or SiLU


def check_quantize(kind: str | None, device: torch.device) -> None:
    if kind is None:
        return
    read_choice(kind, "quantize", KINDS)
    if device.type != "cuda":
        raise NextscaleError(f"quantize='fp8' needs a CUDA GPU, not {device.type}")
    if torch.cuda.get_device_capability(device) < OLDEST:
        raise NextscaleError(
            f"quantize='fp8' needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer (Ada, Hopper)"
        )


def check_change(backbone: Backbone, dtype: torch.dtype) -> None:
    """What was rounded belongs to the dtype that it was rounded from."""
    if dtype != backbone.dtype and any(isinstance(m, FP8Layer) for m in backbone.modules()):
        have, wanted = name_of(backbone.dtype), name_of(dtype)
        raise NextscaleError(f"a model in 8 bits keeps its dtype, {have}; load it again for {wanted}")


@torch.no_grad()
def to_fp8(backbone: Backbone, tokenizer: ImageTokenizer, device: torch.device | None = None) -> None:
    """In place. The old weights are let go of one by one. A decoder's convolutions only where a kernel gains by it.

    A model that is to come to another `device` comes block by block, and is never there as a whole before it is small.
    """
    if backbone.dtype not in (torch.bfloat16, torch.float16):
        raise NextscaleError(f"quantize='fp8' needs dtype bfloat16 or float16, not {name_of(backbone.dtype)}")
    text = text_size(backbone)
    for block in backbone.blocks:
        block.to(device)
        for part in block.modules():
            for name, size in usual_sizes(part, text).items():  # the large layers; text is read once, heads decide
                layer = getattr(part, name)
                if fits(layer):
                    setattr(part, name, FP8Linear(layer, size))
    backbone.to(device)
    tokenizer.to(device)
    if new_enough(tokenizer.device):
        round_convolutions(tokenizer.decoder, takes)


@torch.no_grad()
def round_convolutions(decoder: nn.Module, which: Callable[[nn.Conv2d], bool]) -> None:
    """Those of its residual blocks, behind a norm and SiLU. In place."""
    for block in decoder.modules():
        if isinstance(block, ResidualBlock):
            for name, norm in (("conv1", block.norm1), ("conv2", block.norm2)):
                conv = getattr(block, name)
                if which(conv):
                    size = (norm.weight.float().square() + norm.bias.float().square()).mean().sqrt().item()
                    setattr(block, name, FP8Conv(conv, PASSED * size))


def usual_sizes(part: nn.Module, text: float) -> dict[str, float]:
    """About how large the inputs of its layers are, by root mean square: a norm is in front of a part, and what goes
    through its first layer grows as independent numbers would."""
    if isinstance(part, SelfAttention):
        return {"qkv": 1.0, "proj": grown(1.0, part.qkv.weight.chunk(3)[2], part.v_bias)}
    if isinstance(part, TextAttention):
        return {"q": 1.0, "proj": grown(text, part.kv.weight.chunk(2)[1], part.v_bias)}
    if isinstance(part, MLP):
        return {"fc1": 1.0, "fc2": PASSED * grown(1.0, part.fc1.weight, part.fc1.bias)}
    if isinstance(part, GatedMLP):
        return {"gate": 1.0, "up": 1.0, "down": PASSED * grown(1.0, part.gate.weight) * grown(1.0, part.up.weight)}
    return {}


def text_size(backbone: Backbone) -> float:
    """Of the features that cross-attention reads."""
    if not isinstance(backbone, Infinity):
        return 1.0
    first, last = (layer for layer in backbone.text_proj if isinstance(layer, nn.Linear))
    size = backbone.text_norm.float().square().mean().sqrt().item()
    return grown(PASSED * grown(size, first.weight, first.bias), last.weight, last.bias)


def grown(size: float, weight: Tensor, bias: Tensor | None = None) -> float:
    """What a linear layer makes of independent numbers of this size."""
    square = size**2 * weight.float().square().sum(1).mean().item()
    return math.sqrt(square if bias is None else square + bias.float().square().mean().item())
