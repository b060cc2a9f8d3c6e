"""VAR: class-conditional next-scale transformer (Tian et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from nextscale.engine.guidance import ramp
from nextscale.engine.schedule import Scale, Schedule, Size, only_square
from nextscale.io.config import MAX_BLOCKS, MAX_SIDE, Config, Limits
from nextscale.kernels.residual_norm import gated_add
from nextscale.models.adaln import AdaLNBackbone, AdaLNBlock, AdaLNConditioning
from nextscale.models.layers import MLP, Modulation, SelfAttention, attention_biases


@dataclass(frozen=True)
class VARConfig(Config):
    limits: ClassVar[Limits] = {"depth": (1, MAX_BLOCKS), "sides": (1, MAX_SIDE)}

    depth: int
    width: int
    heads: int
    hidden: int
    sides: tuple[int, ...]  # the model has learned positions, so it knows exactly one schedule
    classes: int = 1000
    vocabulary: int = 4096
    code_dim: int = 32
    shared_modulation: bool = False
    cosine_attention: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_division("width", "heads")


class VARBlock(AdaLNBlock):
    def __init__(self, config: VARConfig) -> None:
        super().__init__(config.eps)
        self.attn = SelfAttention(config.width, config.heads, config.cosine_attention)
        self.mlp = MLP(config.width, config.hidden)
        if config.shared_modulation:
            self.offset = nn.Parameter(torch.zeros(1, 1, 6, config.width))
        else:
            self.modulation = Modulation(config.width, 6)


class VAR(AdaLNBackbone):
    family = "var"
    prompts = "label"
    sublayers = ("self", "ffn")

    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        self.config = config
        self.depth, self.width, self.heads, self.hidden = (
            config.depth,
            config.width,
            config.heads,
            config.hidden,
        )
        self.token_shape, self.token_values = (), config.vocabulary
        width, tokens = config.width, sum(s * s for s in config.sides)
        self.class_embed = nn.Embedding(config.classes + 1, width)  # the last row is "no class"
        self.start_position = nn.Parameter(torch.zeros(1, config.sides[0] ** 2, width))
        self.position = nn.Parameter(torch.zeros(1, tokens, width))
        self.level_embed = nn.Embedding(len(config.sides), width)
        self.word_embed = nn.Linear(config.code_dim, width)
        self.shared_modulation = Modulation(width, 6) if config.shared_modulation else None
        self.blocks = nn.ModuleList(VARBlock(config) for _ in range(config.depth))
        self.head_modulation = Modulation(width, 2)
        self.head_linear = nn.Linear(width, config.vocabulary)

    @staticmethod
    def computes_in_dtype(name: str) -> bool:
        if name.startswith("blocks."):
            return not name.endswith(("log_scale", "offset"))
        return name.startswith("word_embed.")

    def read(self, condition: Tensor, guided: bool) -> tuple[Tensor]:
        """`condition` is a tensor of class labels [B]."""
        labels = condition.to(self.device)
        return (torch.cat((labels, torch.full_like(labels, self.config.classes))) if guided else labels,)

    def prepare(self, inputs: tuple[Tensor | None, ...], schedule: Schedule) -> AdaLNConditioning:
        c = self.class_embed(inputs[0])
        shared = None if self.shared_modulation is None else self.shared_modulation(c)
        modulation = [b.modulation(c) if shared is None else b.offset + shared for b in self.blocks]
        return AdaLNConditioning(
            None, c, modulation, self.head_modulation(c), attention_biases([b.attn for b in self.blocks])
        )

    def embed(self, cond: AdaLNConditioning, inputs: Tensor | None, scale: Scale) -> Tensor:
        position = self.level_embed.weight[scale.index] + self.position[:, scale.start : scale.start + scale.tokens]
        if inputs is None:
            return cond.condition.unsqueeze(1) + self.start_position + position
        return gated_add(position.expand(len(inputs), -1, -1), self.word_embed(inputs.to(self.dtype)), None)

    def positions(self, cond: AdaLNConditioning, scale: Scale) -> None:
        return None  # learned positions are part of the embedding

    def schedule(self, size: Size, stride: int) -> Schedule:
        return only_square(self.config.sides, size, stride)

    def guidance(self, value: float | Sequence[float], scales: int) -> tuple[float, ...]:
        return ramp(value, scales)
