"""Layers that the backbones share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels import ragged_linear
from nextscale.kernels.fp8 import FP8Linear
from nextscale.kernels.linear_fp32 import linear_fp32
from nextscale.kernels.linear_gelu import linear_gelu
from nextscale.kernels.linear_small import linear_split_k
from nextscale.kernels.split_k import SplitKPartials

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed

MAX_LOG_SCALE = math.log(100)


def head_logits(head: nn.Linear, h: Tensor, codes: Tensor | None) -> Tensor:
    """Logits [R, N, V] of the normed states h, or [R, N, n] of the `codes` [R, n] alone."""
    if codes is None:
        return linear_fp32(h, head)
    weight, bias = head.weight[codes], head.bias[codes]  # [R, n, C], [R, n]
    return torch.baddbmm(bias[:, None], h, weight.transpose(1, 2))


def linear(x: Tensor, layer: nn.Linear | FP8Linear, packed: Packed | None, bias: Tensor | None) -> Tensor:
    """Apply `layer` to x [R, K, C], or to packed tokens; with this bias instead of its own."""
    if packed is not None and ragged_linear.supports(x, layer):
        return ragged_linear.linear(x, layer, packed.start, bias)
    return layer(x, bias) if isinstance(layer, FP8Linear) else F.linear(x, layer.weight, bias)


class Modulation(nn.Sequential):
    """AdaLN: `n` vectors per row, computed from the condition. The indices 0, 1 match the official keys."""

    def __init__(self, width: int, n: int) -> None:
        super().__init__(nn.SiLU(), nn.Linear(width, n * width))
        self.n = n

    def forward(self, condition: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype  # half of the weights of a VAR are its blocks' own modulation
        return super().forward(condition.to(dtype)).float().view(len(condition), 1, self.n, -1)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor, packed: Packed | None = None) -> Tensor | SplitKPartials:
        return linear_split_k(linear_gelu(x, self.fc1, self.fc2, packed), self.fc2, packed)


def rotate_pairs(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of adjacent pairs. x [R, H, K, D], positions [1 or R, K, D/2, 2] = (cos, sin)."""
    cos, sin = positions.unsqueeze(1).unbind(-1)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1).flatten(-2)


def rotate_half(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of channels i and i + D/2, each with its own angle. positions [1 or R, K, D, 2]."""
    cos, sin = positions.unsqueeze(1).unbind(-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class SelfAttention(nn.Module):
    """Cosine attention with a learned scale per head, or plain attention with VAR's softer scale."""

    def __init__(
        self, width: int, heads: int, cosine: bool, rotate: Callable[[Tensor, Tensor], Tensor] = rotate_pairs
    ) -> None:
        super().__init__()
        self.heads, self.rotate = heads, rotate
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))  # the key has no bias
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(width, width)
        self.log_scale = nn.Parameter(torch.full((1, heads, 1, 1), math.log(4))) if cosine else None
        self.pairs = rotate is rotate_pairs
        self.softmax_scale = 1.0 if cosine else 0.25 / math.sqrt(width // heads)

    def project_qkv(self, x: Tensor, bias: Tensor | None = None, packed: Packed | None = None) -> Tensor:
        """Queries, keys and values side by side, [R, K, 3, H, D] of x [R, K, C]; `attention_biases` gives the bias."""
        bias = attention_biases([self])[0] if bias is None else bias
        return linear(x, self.qkv, packed, bias).unflatten(-1, (3, self.heads, -1))

    def split(self, qkv: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Each [R, H, K, D]; queries and keys normalized and turned to their positions."""
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.log_scale is not None:
            q = F.normalize(q.float(), dim=-1).mul(self.log_scale.clamp_max(MAX_LOG_SCALE).exp())
            k = F.normalize(k.float(), dim=-1)
        if positions is not None:
            q, k = self.rotate(q.float(), positions), self.rotate(k.float(), positions)
        return q.to(v.dtype), k.to(v.dtype), v

    def project_out(self, attn_out: Tensor, packed: Packed | None = None) -> Tensor | SplitKPartials:
        """[R, H, K, D] -> [R, K, C]."""
        return linear_split_k(attn_out.transpose(1, 2).flatten(2), self.proj, packed)


def attention_biases(attns: Sequence[SelfAttention]) -> list[Tensor]:
    """The biases of queries, keys and values side by side, [3 C] for every layer: joined once for a whole run."""
    no_bias = torch.zeros_like(attns[0].q_bias)
    return list(torch.cat([t for a in attns for t in (a.q_bias, no_bias, a.v_bias)]).chunk(len(attns)))
