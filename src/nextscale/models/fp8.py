"""FP8 (e4m3) weights for the blocks of a backbone, and for a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nextscale.errors import NextscaleError
from nextscale.io.arguments import read_choice
from nextscale.io.devices import dtype_name
from nextscale.kernels import conv as fp8_conv
from nextscale.kernels.fp8 import MIN_CAPABILITY, FP8Conv, FP8Layer, FP8Linear, is_roundable
from nextscale.models.base import Backbone
from nextscale.models.hart import GatedMLP
from nextscale.models.infinity import Infinity, TextAttention
from nextscale.models.layers import MLP, SelfAttention
from nextscale.tokenizers.autoencoder import ResidualBlock
from nextscale.tokenizers.base import ImageTokenizer

QUANTIZE_KINDS = ("fp8",)
ACTIVATION_GAIN = 0.5  # of the root mean square of its input is left by GELU or SiLU


def check_quantize(kind: str | None, device: torch.device) -> None:
    if kind is None:
        return
    read_choice(kind, "quantize", QUANTIZE_KINDS)
    if device.type != "cuda":
        raise NextscaleError(f"quantize='fp8' needs a CUDA GPU, not {device.type}")
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        least = ".".join(map(str, MIN_CAPABILITY))
        raise NextscaleError(f"quantize='fp8' needs a GPU of compute capability {least} or newer (Ada, Hopper)")


def check_change(backbone: Backbone, dtype: torch.dtype) -> None:
    """Raise an error if a quantized model shall change its dtype: rounded weights belong to the one they came from."""
    if dtype != backbone.dtype and any(isinstance(m, FP8Layer) for m in backbone.modules()):
        have, wanted = dtype_name(backbone.dtype), dtype_name(dtype)
        raise NextscaleError(f"a model in 8 bits keeps its dtype, {have}; load it again for {wanted}")


@torch.no_grad()
def to_fp8(backbone: Backbone, tokenizer: ImageTokenizer, device: torch.device | None = None) -> None:
    """Quantize in place, and free the old weights one by one; a decoder's convolutions only where a kernel gains by it.

    A model that is moved to another `device` comes block by block, and is never there as a whole before it is small.
    """
    if backbone.dtype not in (torch.bfloat16, torch.float16):
        raise NextscaleError(f"quantize='fp8' needs dtype bfloat16 or float16, not {dtype_name(backbone.dtype)}")
    text = text_rms(backbone)
    for block in backbone.blocks:
        block.to(device)
        for module in block.modules():
            for name, rms in input_rms(module, text).items():  # the large layers; text is read once, heads decide
                layer = getattr(module, name)
                if is_roundable(layer):
                    setattr(module, name, FP8Linear(layer, rms))
    backbone.to(device)
    tokenizer.to(device)
    round_convolutions(tokenizer.decoder, lambda layer: fp8_conv.supports(layer, tokenizer.device))


@torch.no_grad()
def round_convolutions(decoder: nn.Module, where: Callable[[nn.Conv2d], bool]) -> None:
    """Quantize those of the residual blocks, behind a norm and SiLU, in place."""
    for block in decoder.modules():
        if isinstance(block, ResidualBlock):
            for name, norm in (("conv1", block.norm1), ("conv2", block.norm2)):
                conv = getattr(block, name)
                if where(conv):
                    rms = (norm.weight.float().square() + norm.bias.float().square()).mean().sqrt().item()
                    setattr(block, name, FP8Conv(conv, ACTIVATION_GAIN * rms))


def input_rms(module: nn.Module, text: float) -> dict[str, float]:
    """The approximate root mean square of the inputs of a sublayer's layers: the first reads a norm, and the
    output of a layer grows as that of independent numbers would."""
    if isinstance(module, SelfAttention):
        return {"qkv": 1.0, "proj": output_rms(1.0, module.qkv.weight.chunk(3)[2], module.v_bias)}
    if isinstance(module, TextAttention):
        return {"q": 1.0, "proj": output_rms(text, module.kv.weight.chunk(2)[1], module.v_bias)}
    if isinstance(module, MLP):
        return {"fc1": 1.0, "fc2": ACTIVATION_GAIN * output_rms(1.0, module.fc1.weight, module.fc1.bias)}
    if isinstance(module, GatedMLP):
        down = ACTIVATION_GAIN * output_rms(1.0, module.gate.weight) * output_rms(1.0, module.up.weight)
        return {"gate": 1.0, "up": 1.0, "down": down}
    return {}


def text_rms(backbone: Backbone) -> float:
    """The root mean square of the features that cross-attention reads."""
    if not isinstance(backbone, Infinity):
        return 1.0
    first, last = (layer for layer in backbone.text_proj if isinstance(layer, nn.Linear))
    rms = backbone.text_norm.float().square().mean().sqrt().item()
    return output_rms(ACTIVATION_GAIN * output_rms(rms, first.weight, first.bias), last.weight, last.bias)


def output_rms(rms: float, weight: Tensor, bias: Tensor | None = None) -> float:
    """The root mean square of a linear layer's output for independent inputs."""
    square = rms**2 * weight.float().square().sum(1).mean().item()
    return math.sqrt(square if bias is None else square + bias.float().square().mean().item())
