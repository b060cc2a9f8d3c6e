"""VAR: class-conditional next-scale transformer (Tian et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nextscale.errors import NextscaleError
from nextscale.guidance import ramp
from nextscale.kv import Memory
from nextscale.models.base import Backbone, State, per_row
from nextscale.models.layers import MLP, Modulation, SelfAttention, modulated_norm
from nextscale.schedule import Scale, Schedule


@dataclass(frozen=True)
class VARConfig:
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


@dataclass(frozen=True)
class VARState(State):
    condition: Tensor = per_row()  # [R, C]
    modulation: list[Tensor] = per_row()  # per block [R, 1, 6, C]: gamma 1 and 2, scale 1 and 2, shift 1 and 2
    head_modulation: Tensor = per_row()  # [R, 1, 2, C]


class VARBlock(nn.Module):
    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        self.attn = SelfAttention(config.width, config.heads, config.cosine_attention)
        self.mlp = MLP(config.width, config.hidden)
        if config.shared_modulation:
            self.offset = nn.Parameter(torch.zeros(1, 1, 6, config.width))
        else:
            self.modulation = Modulation(config.width, 6)


class VAR(Backbone):
    family = "var"
    prompts = "label"
    parts = ("self", "ffn")

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
        self.blocks: Any = nn.ModuleList(VARBlock(config) for _ in range(config.depth))
        self.head_modulation = Modulation(width, 2)
        self.head_linear = nn.Linear(width, config.vocabulary)

    @property
    def dtype(self) -> torch.dtype:
        return self.word_embed.weight.dtype

    @staticmethod
    def computes_in_dtype(name: str) -> bool:
        if name.startswith("blocks."):
            return not name.endswith(("log_scale", "offset"))
        return name.startswith("word_embed.")

    def begin(self, condition: Tensor, schedule: Schedule, guided: bool) -> VARState:
        """`condition` is a tensor of class labels [B]."""
        labels = condition.to(self.device)
        if guided:
            labels = torch.cat((labels, torch.full_like(labels, self.config.classes)))
        c = self.class_embed(labels)
        shared = None if self.shared_modulation is None else self.shared_modulation(c)
        modulation = [b.modulation(c) if shared is None else b.offset + shared for b in self.blocks]
        return VARState(None, c, modulation, self.head_modulation(c))

    def embed(self, state: VARState, inputs: Tensor | None, scale: Scale) -> Tensor:
        position = self.level_embed.weight[scale.index] + self.position[:, scale.start : scale.start + scale.tokens]
        if inputs is None:
            return state.condition.unsqueeze(1) + self.start_position + position
        return self.word_embed(inputs.to(self.dtype)).float() + position

    def positions(self, state: VARState, scale: Scale) -> None:
        return None  # learned positions are part of the embedding

    def compute(
        self,
        state: VARState,
        layer: int,
        part: str,
        x: Tensor,
        positions: Tensor | None,
        memory: Memory,
        count: Tensor | None = None,
    ) -> Tensor:
        block = self.blocks[layer]
        gamma1, gamma2, scale1, scale2, shift1, shift2 = state.modulation[layer].unbind(2)
        if part == "self":
            h = modulated_norm(x, scale1, shift1, self.config.eps).to(self.dtype)
            return block.attn(h, positions, memory, count).mul(gamma1)
        h = modulated_norm(x, scale2, shift2, self.config.eps).to(self.dtype)
        return block.mlp(h).mul(gamma2)

    def head(self, state: VARState, x: Tensor) -> Tensor:
        scale, shift = state.head_modulation.unbind(2)
        return self.head_linear(modulated_norm(x, scale, shift, self.config.eps))

    def schedule(
        self,
        height: int | None = None,
        width: int | None = None,
        aspect_ratio: float | None = None,
        pixel_budget: str | None = None,
        stride: int = 16,
    ) -> Schedule:
        size = self.config.sides[-1] * stride
        asked = (height or size, width or size)
        if asked != (size, size) or aspect_ratio not in (None, 1) or pixel_budget is not None:
            raise NextscaleError(f"this model makes pictures of {size}x{size} only: its positions are learned")
        return Schedule.squares(self.config.sides)

    def guidance(self, value: float | Sequence[float], scales: int) -> tuple[float, ...]:
        return ramp(value, scales)

    def flops(self, part: str, tokens: int, keys: int) -> int:
        c = self.width
        if part == "self":
            return 2 * tokens * 4 * c * c + 4 * tokens * keys * c
        return 4 * tokens * c * self.hidden
