"""Tiny models with random weights, for tests of methods and models: seconds on a CPU, images of nothing."""

from __future__ import annotations

import torch
from torch import nn

from nextscale.models.hart import HART, HARTConfig
from nextscale.models.infinity import Infinity, InfinityConfig
from nextscale.models.registry import Defaults, ModelSpec
from nextscale.models.var import VAR, VARConfig
from nextscale.pipeline import Pipeline
from nextscale.tokenizers.bsq import BSQConfig, BSQTokenizer
from nextscale.tokenizers.vq import VQConfig, VQTokenizer


@torch.no_grad()
def randomize(module: nn.Module, seed: int = 0) -> None:
    """Fill parameters with random numbers: none keeps zero or one, and signals neither die nor explode."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("log_scale"):
            p.copy_(noise * 0.3 + 1.4)
        elif "norm" in name and name.endswith("weight") and p.ndim == 1:
            p.copy_(1 + 0.2 * noise)
        elif p.ndim >= 2 and "embed" not in name and "offset" not in name:
            p.copy_(noise / p[0].numel() ** 0.5)
        else:
            p.copy_(0.3 * noise)
    module.eval().requires_grad_(False)


def tiny_var(
    seed: int = 0, shared_modulation: bool = False, cosine_attention: bool = True, width: int = 32
) -> Pipeline:
    """8 scales up to 8 x 8 tokens and 16 x 16 pixels, 10 classes."""
    sides = (1, 2, 3, 4, 5, 6, 7, 8)
    tokenizer = VQTokenizer(VQConfig(vocabulary=64, code_dim=8, channels=32, multipliers=(1, 1), residual_blocks=1))
    config = VARConfig(
        depth=4,
        width=width,
        heads=2,
        hidden=64,
        sides=sides,
        classes=10,
        vocabulary=64,
        code_dim=8,
        shared_modulation=shared_modulation,
        cosine_attention=cosine_attention,
    )
    backbone = VAR(config)
    return _pipeline("tiny-var", backbone, tokenizer, Defaults(3.0, top_k=20), None, seed)


def tiny_infinity(
    seed: int = 0, patchify: bool = False, text_dim: int = 128, width: int = 32, text_length: int = 16
) -> Pipeline:
    """10 scales up to 32 x 32 tokens; prompts are given as `prompt_embeds` of width `text_dim`."""
    tokenizer = BSQTokenizer(
        BSQConfig(code_dim=4, channels=32, multipliers=(1, 1), residual_blocks=1, patchify=patchify)
    )
    config = InfinityConfig(
        depth=4,
        width=width,
        heads=2,
        bits=tokenizer.bits,
        hidden=64,
        text_dim=text_dim,
        text_length=text_length,
        pool_heads=2,
    )
    return _pipeline("tiny-infinity", Infinity(config), tokenizer, Defaults(3.0, top_p=0.97), "0.25M", seed)


@torch.no_grad()
def tiny_hart(seed: int = 0, cosine_attention: bool = False, width: int = 32) -> Pipeline:
    """8 scales up to 8 x 8 tokens and 16 x 16 pixels, 12 tokens of text; prompts as `prompt_embeds` of width 128."""
    sides = (1, 2, 3, 4, 5, 6, 7, 8)
    tokenizer = VQTokenizer(
        VQConfig(vocabulary=64, code_dim=8, channels=32, multipliers=(1, 1), residual_blocks=1, hybrid=True)
    )
    config = HARTConfig(
        depth=4,
        width=width,
        heads=2,
        hidden=64,
        sides=sides,
        text_dim=128,
        text_length=12,
        vocabulary=64,
        code_dim=8,
        cosine_attention=cosine_attention,
        diffusion_width=32,
        diffusion_depth=2,
        diffusion_steps=4,
    )
    backbone = HART(config)
    pipe = _pipeline("tiny-hart", backbone, tokenizer, Defaults(3.0, top_k=20, top_p=0.0), None, seed)
    # Its attention is soft and its positions only turn queries, so random weights see little of either.
    backbone.head_modulation.weight.mul_(0.1)
    backbone.head_modulation.bias.mul_(0.1)
    backbone.head_linear.weight.mul_(5)
    return pipe


def _pipeline(
    name: str,
    backbone: VAR | Infinity | HART,
    tokenizer: VQTokenizer | BSQTokenizer,
    defaults: Defaults,
    budget: str | None,
    seed: int,
) -> Pipeline:
    randomize(backbone, seed)
    randomize(tokenizer, seed + 1)
    spec = ModelSpec(
        name, backbone.family, backbone.config, tokenizer.config, defaults, "", "", (), pixel_budget=budget
    )
    return Pipeline(backbone, tokenizer, spec, progress_bar=False)
