"""What VAR and Infinity have in common: blocks whose norms and gates are set by the condition (AdaLN)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nextscale.kernels.logit_lens import BitHead
from nextscale.kernels.residual_norm import Norm
from nextscale.models.base import Backbone, Block, Conditioning, per_row, shared
from nextscale.models.layers import MLP, head_logits
from nextscale.models.residual import ResidualStream


@dataclass(frozen=True)
class AdaLNConditioning(Conditioning):
    condition: Tensor = per_row()  # [R, C]
    modulation: list[Tensor] = per_row()  # per block [R, 1, 6, C]: gamma 1 and 2, scale 1 and 2, shift 1 and 2
    head_modulation: Tensor = per_row()  # [R, 1, 2, C]
    biases: list[Tensor] = shared()  # per block, of queries, keys and values


class AdaLNBlockCond(NamedTuple):
    modulation: Tensor  # [R, 1, 6, C]
    bias: Tensor  # [3 C]


class AdaLNBlock(Block):
    """Self-attention and MLP."""

    mlp: MLP

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def qkv(self, stream: ResidualStream, block_cond: Any) -> Tensor:
        _, _, scale, _, shift, _ = block_cond.modulation.unbind(2)
        normed = stream.normed(Norm(self.eps, scale, shift, plus_one=True), self.attn.qkv)
        return self.attn.project_qkv(normed, block_cond.bias, stream.packed)

    def out_proj(self, stream: ResidualStream, attn_out: Tensor, block_cond: Any) -> None:
        stream.add(self.attn.project_out(attn_out, stream.packed), block_cond.modulation[:, :, 0])

    def sublayer(self, name: str, stream: ResidualStream, block_cond: Any) -> None:
        _, gamma, _, scale, _, shift = block_cond.modulation.unbind(2)
        normed = stream.normed(Norm(self.eps, scale, shift, plus_one=True), self.mlp.fc1)
        stream.add(self.mlp(normed, stream.packed), gamma)


class AdaLNBackbone(Backbone):
    word_embed: Any
    head_linear: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.word_embed.weight.dtype

    def block_cond(self, cond: Any, layer: int) -> Any:
        return AdaLNBlockCond(cond.modulation[layer], cond.biases[layer])

    def head(self, cond: Any, x: Tensor, codes: Tensor | None = None) -> Tensor:
        scale, shift = cond.head_modulation[: len(x)].unbind(2)
        normed = ResidualStream(x).normed(Norm(self.config.eps, scale, shift, plus_one=True), self.head_linear)
        logits = head_logits(self.head_linear, normed, codes)
        return logits if codes is not None else logits.unflatten(-1, (*self.token_shape, self.token_values))

    def bit_head(self, cond: Any, images: int) -> BitHead:
        scale, shift = cond.head_modulation[:images, 0].unbind(1)
        return BitHead.of(self.head_linear, scale, shift, self.config.eps)
