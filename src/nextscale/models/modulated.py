"""What VAR and Infinity have in common: blocks whose norms and gates are set by the condition (AdaLN)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nextscale.kv import Memory
from nextscale.models.base import Backbone, State, per_row
from nextscale.models.layers import MLP, SelfAttention, head_logits, modulated_norm


@dataclass(frozen=True)
class ModulatedState(State):
    condition: Tensor = per_row()  # [R, C]
    modulation: list[Tensor] = per_row()  # per block [R, 1, 6, C]: gamma 1 and 2, scale 1 and 2, shift 1 and 2
    head_modulation: Tensor = per_row()  # [R, 1, 2, C]


class ModulatedBlock(nn.Module):
    """Self-attention and MLP. It is given its layer's part of the state, so that one compiled function fits all."""

    attn: SelfAttention
    mlp: MLP

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    @property
    def dtype(self) -> torch.dtype:
        return self.mlp.fc1.weight.dtype

    def part(
        self, name: str, x: Tensor, modulation: Tensor, positions: Tensor | None, memory: Memory, count: Tensor | None
    ) -> Tensor:
        """What the part adds to x [R, K, C], after its gate; modulation is [R, 1, 6, C]."""
        gamma1, gamma2, scale1, scale2, shift1, shift2 = modulation.unbind(2)
        if name == "self":
            h = modulated_norm(x, scale1, shift1, self.eps).to(self.dtype)
            return self.attn(h, positions, memory, count).mul(gamma1)
        h = modulated_norm(x, scale2, shift2, self.eps).to(self.dtype)
        return self.mlp(h).mul(gamma2)


class ModulatedBackbone(Backbone):
    blocks: Any  # of ModulatedBlock
    word_embed: Any
    head_linear: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.word_embed.weight.dtype

    def compute(
        self,
        state: Any,
        layer: int,
        part: str,
        x: Tensor,
        positions: Tensor | None,
        memory: Memory,
        count: Tensor | None = None,
    ) -> Tensor:
        return self.blocks[layer].part(part, x, state.modulation[layer], positions, memory, count)

    def head(self, state: Any, x: Tensor, codes: Tensor | None = None) -> Tensor:
        scale, shift = state.head_modulation[: len(x)].unbind(2)
        logits = head_logits(self.head_linear, modulated_norm(x, scale, shift, self.config.eps), codes)
        return logits if codes is not None else logits.unflatten(-1, (*self.token_shape, self.token_values))

    def flops(self, part: str, tokens: int, keys: int) -> int:
        c = self.width
        if part == "self":
            return 2 * tokens * 4 * c * c + 4 * tokens * keys * c
        return 4 * tokens * c * self.hidden
