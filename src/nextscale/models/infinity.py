"""Infinity: text-to-image next-scale transformer with bitwise tokens (Han et al., 2024)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.engine.guidance import per_scale
from nextscale.engine.schedule import Grid, Scale, Schedule, Size, infinity_schedule, infinity_schedule_for_size
from nextscale.errors import NextscaleError
from nextscale.io.config import MAX_BLOCKS, Config, Limits
from nextscale.kernels import absorbed_cross_attention, flash_attention
from nextscale.kernels.fp8 import input_format
from nextscale.kernels.linear_small import linear_split_k
from nextscale.kernels.residual_norm import Norm, gated_add
from nextscale.kernels.sdpa import scaled_dot_product_attention
from nextscale.kernels.split_k import SplitKPartials
from nextscale.models.adaln import AdaLNBackbone, AdaLNBlock, AdaLNConditioning
from nextscale.models.base import per_row, shared
from nextscale.models.layers import MLP, Modulation, SelfAttention, attention_biases, linear
from nextscale.models.residual import ResidualStream
from nextscale.models.text_conditioning import TextCondition, lengths_and_mask

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed


@dataclass(frozen=True)
class InfinityConfig(Config):
    limits: ClassVar[Limits] = {"depth": (1, MAX_BLOCKS)}

    depth: int
    width: int
    heads: int
    bits: int  # per token; 4 x the tokenizer's with spatial patchify
    hidden: int
    text_dim: int = 2048
    text_length: int = 512
    levels: int = 15
    pool_heads: int = 16
    eps: float = 1e-6
    # The official code rounds cross-attention to bfloat16 even in a float32 run; off = exact.
    round_cross_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_division("width", "heads", 4)  # pairs of channels, half of them for rows, half for columns
        self.require_division("width", "pool_heads")

    def supports_text(self, rows: int, width: int) -> bool:
        """Whether text features [rows, width] can be read."""
        return width == self.text_dim and 1 <= rows <= self.text_length


@dataclass(frozen=True)
class InfinityConditioning(AdaLNConditioning):
    text_keys: list[tuple[Tensor, Tensor]] = per_row()  # per block k, v [R, H, T, D]
    text_mask: Tensor | None = per_row()  # [R, 1, 1, T], None when no row is padded
    rotary: Tensor = shared()  # [1, all tokens, D/2, 2]


class InfinityBlockCond(NamedTuple):
    modulation: Tensor  # [R, 1, 6, C]
    bias: Tensor  # of queries, keys and values, [3 C]
    keys: Tensor  # of the text, [R, H, T, D]
    values: Tensor
    mask: Tensor | None  # [R, 1, 1, T]
    lengths: Tensor | None = None  # the mask as the number of keys that a row sees


class TextAttention(nn.Module):
    """Attention over the prompt. With a learned query it pools the prompt into one vector."""

    def __init__(self, width: int, text_dim: int, heads: int, rounded: bool, pool: bool = False) -> None:
        super().__init__()
        self.heads, self.rounded = heads, rounded
        if pool:
            self.query = nn.Parameter(torch.zeros(1, heads, width // heads))
        else:
            self.q = nn.Linear(width, width)
        self.kv = nn.Linear(text_dim, 2 * width, bias=False)
        self.v_bias = nn.Parameter(torch.zeros(width))  # the key has no bias
        self.proj = nn.Linear(width, width)

    def keys(self, text: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """k, v [R, H, T, D] of the prompts [R, T, text_dim]; `key_biases` gives the bias."""
        bias = key_biases([self])[0] if bias is None else bias
        kv = F.linear(text.to(self.kv.weight.dtype), self.kv.weight, bias)
        k, v = kv.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return k, v

    def forward(
        self,
        x: Tensor | None,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        lengths: Tensor | None = None,
        packed: Packed | None = None,
    ) -> Tensor:
        """Attention of x [R, K, C] over the text, of the same shape; None = of the learned query, [R, 1, C]."""
        if x is None:
            q = self.query.to(k.dtype).expand(len(k), -1, -1).unsqueeze(2)
        else:
            q = linear(x, self.q, packed, self.q.bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.rounded:
            q, k, v = (t.bfloat16().float() for t in (q, k, v))
        scale = 1 / math.sqrt(q.shape[-1])
        if lengths is not None and (packed is not None or flash_attention.supports(q)):
            wanted = None if self.rounded else input_format(self.proj)
            out, _ = flash_attention.attend(q, k, v, scale, lengths, input_format=wanted, chosen=packed)
        else:
            out = scaled_dot_product_attention(q, k, v, scale, mask)
        if self.rounded:
            out = out.bfloat16().to(self.v_bias.dtype)
        return out.transpose(1, 2).flatten(2)

    def attend(
        self,
        x: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        lengths: Tensor | None = None,
        packed: Packed | None = None,
    ) -> Tensor | SplitKPartials:
        """Attention through the output projection, for a stream to add."""
        unpadded = packed is None and (lengths is not None or mask is None)
        if unpadded and absorbed_cross_attention.supports(x, k, self.q, self.proj):
            return absorbed_cross_attention.attend(x, self.q, self.proj, k, v, 1 / math.sqrt(k.shape[-1]), lengths)
        return linear_split_k(self(x, k, v, mask, lengths, packed), self.proj, packed)


def key_biases(attns: Sequence[TextAttention]) -> list[Tensor]:
    """The biases of keys and values side by side, [2 C] for every layer."""
    no_bias = torch.zeros_like(attns[0].v_bias)
    return list(torch.cat([t for a in attns for t in (no_bias, a.v_bias)]).chunk(len(attns)))


class InfinityBlock(AdaLNBlock):
    def __init__(self, config: InfinityConfig) -> None:
        super().__init__(config.eps)
        width = config.width
        self.attn = SelfAttention(width, config.heads, cosine=True)
        self.cross_norm = nn.LayerNorm(width, eps=config.eps)
        self.cross = TextAttention(width, width, config.heads, config.round_cross_attention)
        self.mlp = MLP(width, config.hidden)
        self.offset = nn.Parameter(torch.zeros(1, 1, 6, width))

    def sublayer(self, name: str, stream: ResidualStream, block_cond: InfinityBlockCond) -> None:
        if name == "cross":
            norm = self.cross_norm
            normed = stream.normed(Norm(norm.eps, norm.weight, norm.bias), self.cross.q)
            b, packed = block_cond, stream.packed
            stream.add(self.cross.attend(normed, b.keys, b.values, b.mask, b.lengths, packed))
        else:
            super().sublayer(name, stream, block_cond)


@functools.lru_cache(maxsize=4)  # copying it to a GPU takes longer than the first scales
@torch.inference_mode(False)
def rotary_table(head_dim: int, schedule: Schedule, device: torch.device) -> Tensor:
    """cos and sin for every token of a schedule, [tokens, head_dim / 2, 2].

    Cells of a small grid sit at the nearest cell of the frame, which is the full-size grid of the same
    ratio whatever size is generated; those of a larger grid sit between its cells. The first half of the pairs turns
    with the row, the second with the column.
    """
    half = head_dim // 2
    frequency = 1.0 / (10000 ** (torch.arange(0, half, 2, dtype=torch.float32) / half))

    def angles(cells: int, of: int) -> Tensor:
        position = torch.arange(cells, dtype=torch.float32) * (of / cells)
        return torch.outer(position.round() if cells <= of else position, frequency)  # half to even, as torch does

    def grid_angles(grid: Grid) -> Tensor:
        (h, w), (frame_h, frame_w) = grid, schedule.frame
        rows = angles(h, frame_h)[:, None].expand(h, w, -1)
        columns = angles(w, frame_w)[None].expand(h, w, -1)
        return torch.cat((rows, columns), dim=-1).flatten(0, 1)

    angle = torch.cat([grid_angles(grid) for grid in schedule.grids])
    return torch.stack((angle.cos(), angle.sin()), dim=-1).to(device)


class Infinity(AdaLNBackbone):
    family = "infinity"
    prompts = "text"
    sublayers = ("self", "cross", "ffn")

    def __init__(self, config: InfinityConfig) -> None:
        super().__init__()
        self.config = config
        self.depth, self.width, self.heads, self.hidden = (
            config.depth,
            config.width,
            config.heads,
            config.hidden,
        )
        self.token_shape, self.token_values = (config.bits,), 2
        width = config.width
        self.unconditional = nn.Parameter(torch.zeros(config.text_length, config.text_dim))
        self.text_norm = nn.Parameter(torch.ones(config.text_dim))
        self.text_pool = TextAttention(
            width, config.text_dim, config.pool_heads, config.round_cross_attention, pool=True
        )
        self.text_proj = nn.Sequential(
            nn.Linear(config.text_dim, width), nn.GELU(approximate="tanh"), nn.Linear(width, width)
        )
        self.start_position = nn.Parameter(torch.zeros(1, 1, width))
        self.level_embed = nn.Embedding(config.levels, width)
        self.word_embed = nn.Linear(config.bits, width)
        self.shared_modulation = Modulation(width, 6)
        self.blocks = nn.ModuleList(InfinityBlock(config) for _ in range(config.depth))
        self.head_modulation = Modulation(width, 2)
        self.head_linear = nn.Linear(width, 2 * config.bits)

    @staticmethod
    def computes_in_dtype(name: str) -> bool:
        if name.startswith("blocks."):
            return not (name.endswith(("log_scale", "offset")) or ".cross_norm." in name)
        return name.startswith(("word_embed.", "text_pool.", "text_proj."))

    def text_rows(self, condition: TextCondition, guided: bool) -> list[Tensor]:
        """The prompt of every row: an unconditional row is as long as its prompt unless a negative one is given."""
        rows = [t.to(self.device) for t in condition.text]
        if guided:
            for text, negative in zip(condition.text, condition.negatives, strict=True):
                rows.append(self.unconditional[: len(text)] if negative is None else negative.to(self.device))
        return rows

    def read(self, condition: TextCondition, guided: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The prompts as text [R, T, text_dim], lengths [R] and mask [R, 1, 1, T].

        Without `padded_lengths` the mask is None if no row is padded.
        """
        rows = self.text_rows(condition, guided)
        counts = tuple(map(len, rows))
        length, longest = max(counts), self.config.text_length
        if condition.padded_lengths:
            length = next((n for n in condition.padded_lengths if length <= n < longest), max(longest, length))
        text = torch.stack([F.pad(row, (0, 0, 0, length - len(row))) for row in rows]).float()
        return text, *lengths_and_mask(counts, length, self.device, always=bool(condition.padded_lengths))

    def read_text(self, text: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The pooled condition [R, C] and the text features of cross-attention, [R, T, C]."""
        text = text * torch.rsqrt(text.square().mean(-1, keepdim=True) + self.config.eps) * self.text_norm
        pool = self.text_pool
        pooled = pool.proj(pool(None, *pool.keys(text), mask)).squeeze(1).float()
        return pooled, self.text_proj(text.to(self.dtype))

    def prepare(self, inputs: tuple[Tensor | None, ...], schedule: Schedule) -> InfinityConditioning:
        text, lengths, mask = inputs
        assert text is not None
        c, features = self.read_text(text, mask)
        offsets = torch.stack([b.offset for b in self.blocks])
        biases = key_biases([b.cross for b in self.blocks])
        return InfinityConditioning(
            text_lengths=lengths,
            condition=c,
            modulation=list((offsets + self.shared_modulation(c)).unbind()),
            head_modulation=self.head_modulation(c),
            biases=attention_biases([b.attn for b in self.blocks]),
            text_keys=[b.cross.keys(features, bias) for b, bias in zip(self.blocks, biases, strict=True)],
            text_mask=mask,
            rotary=rotary_table(self.head_dim, schedule, self.device)[None],
        )

    def embed(self, cond: InfinityConditioning, inputs: Tensor | None, scale: Scale) -> Tensor:
        level = self.level_embed.weight[scale.index]
        if inputs is None:
            return cond.condition.unsqueeze(1) + self.start_position + level
        return gated_add(level.expand(*inputs.shape[:2], -1), self.word_embed(inputs.to(self.dtype)), None)

    def positions(self, cond: InfinityConditioning, scale: Scale) -> Tensor:
        return cond.rotary[:, scale.start : scale.start + scale.tokens]

    def block_cond(self, cond: InfinityConditioning, layer: int) -> InfinityBlockCond:
        text = *cond.text_keys[layer], cond.text_mask, cond.text_lengths
        return InfinityBlockCond(cond.modulation[layer], cond.biases[layer], *text)

    def schedule(self, size: Size, stride: int) -> Schedule:
        if size.height is None and size.width is None:
            schedule = infinity_schedule(
                1.0 if size.aspect_ratio is None else size.aspect_ratio, size.pixel_budget or "1M"
            )
        elif size.height is None or size.width is None or (size.aspect_ratio, size.pixel_budget) != (None, None):
            raise NextscaleError("give either both height and width, or aspect_ratio and pixel_budget")
        else:
            schedule = infinity_schedule_for_size(size.height, size.width, stride)
        if len(schedule) > self.config.levels:
            raise NextscaleError(f"this model knows {self.config.levels} scales, the schedule has {len(schedule)}")
        return schedule

    def guidance(self, value: float | Sequence[float], scales: int) -> tuple[float, ...]:
        return per_scale(value, scales, "guidance_scale")

    def flops(self, sublayer: str, tokens: int, keys: int) -> int:
        if sublayer == "cross":  # keys and values of the text are computed once per run, not here
            return 2 * tokens * 2 * self.width**2 + 4 * tokens * keys * self.width
        return super().flops(sublayer, tokens, keys)
