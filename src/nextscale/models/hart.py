"""HART: text-to-image next-scale transformer with hybrid tokens (Tang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.engine.guidance import Number, guide, on_device, ramp
from nextscale.engine.rng import NoiseSource
from nextscale.engine.sampling import Sampled
from nextscale.engine.schedule import Scale, Schedule, Size, only_square
from nextscale.errors import NextscaleError
from nextscale.io.arguments import is_single
from nextscale.io.config import MAX_BLOCKS, MAX_SIDE, Config, Limits
from nextscale.kernels import ragged_linear
from nextscale.kernels.linear_small import linear_split_k
from nextscale.kernels.residual_norm import Norm
from nextscale.kernels.split_k import SplitKPartials
from nextscale.models.base import Backbone, Block, Conditioning, per_row, shared
from nextscale.models.layers import SelfAttention, attention_biases, head_logits, linear, rotate_half
from nextscale.models.residual import ResidualStream
from nextscale.models.residual_diffusion import TRAINING_STEPS, ResidualDiffusion, SinusoidEmbedding
from nextscale.models.text_conditioning import TextCondition, left_padded

if TYPE_CHECKING:
    from nextscale.engine.rows import Rows
    from nextscale.methods.selection import Packed
    from nextscale.tokenizers.base import ImageTokenizer


@dataclass(frozen=True)
class HARTConfig(Config):
    limits: ClassVar[Limits] = {
        "depth": (1, MAX_BLOCKS),
        "diffusion_depth": (1, MAX_BLOCKS),
        "diffusion_steps": (2, TRAINING_STEPS),
        "sides": (1, MAX_SIDE),
        "text_length": (1, 2**14),
    }

    depth: int
    width: int
    heads: int
    hidden: int
    sides: tuple[int, ...]
    text_dim: int = 1536
    text_length: int = 300  # tokens of text in front of the image, padding included
    vocabulary: int = 4096
    code_dim: int = 32
    cosine_attention: bool = False
    text_normalized: bool = True
    sinusoid_levels: bool = True
    diffusion_width: int = 1024
    diffusion_depth: int = 6
    diffusion_steps: int = 8
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_division("width", "heads", 4)  # pairs of channels, half of them for rows, half for columns
        if self.sides[0] != 1:
            raise NextscaleError(f"sides = {list(self.sides)} must begin with 1: the text predicts one token")

    def supports_text(self, rows: int, width: int) -> bool:
        """Whether text features [rows, width] can be read: some without their positions, or all of them with theirs."""
        return (width == self.text_dim and 1 <= rows <= self.text_length) or (
            width == self.text_dim + 1 and rows == self.text_length
        )


@dataclass(frozen=True)
class HARTConditioning(Conditioning):
    context: Tensor = per_row()  # [R, T, C]
    text_positions: Tensor = per_row()  # [R, T]
    head_modulation: Tensor = per_row()  # [R, 1, 2, C]
    biases: list[Tensor] = shared()  # per block, of queries, keys and values [3 C]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.norm.apply(x)

    @property
    def norm(self) -> Norm:
        return Norm(self.eps, self.weight, rms=True)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, packed: Packed | None = None) -> Tensor | SplitKPartials:
        gate, up = (linear(x, layer, packed, None) for layer in (self.gate, self.up))
        if packed is not None and ragged_linear.supports(gate, self.down):
            gated = ragged_linear.silu_and_mul(gate, up, packed.start, self.down)
        else:
            gated = F.silu(gate) * up
        return linear_split_k(gated, self.down, packed)


class HARTBlock(Block):
    def __init__(self, config: HARTConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.eps)  # one weight for both sublayers
        self.attn = SelfAttention(config.width, config.heads, config.cosine_attention, rotate_half)
        self.mlp = GatedMLP(config.width, config.hidden)

    def qkv(self, stream: ResidualStream, block_cond: Tensor) -> Tensor:
        """`block_cond` is the bias of queries, keys and values."""
        return self.attn.project_qkv(stream.normed(self.norm.norm, self.attn.qkv), block_cond, stream.packed)

    def out_proj(self, stream: ResidualStream, attn_out: Tensor, block_cond: Tensor) -> None:
        stream.add(self.attn.project_out(attn_out, stream.packed))

    def sublayer(self, name: str, stream: ResidualStream, block_cond: Tensor) -> None:
        stream.add(self.mlp(stream.normed(self.norm.norm, self.mlp.gate), stream.packed))


class HART(Backbone):
    family = "hart"
    prompts = "text"
    sublayers = ("self", "ffn")
    mlp_matrices = 3

    def __init__(self, config: HARTConfig) -> None:
        super().__init__()
        self.config = config
        self.depth, self.width, self.heads, self.hidden = config.depth, config.width, config.heads, config.hidden
        self.token_shape, self.token_values = (), config.vocabulary
        self.context = config.text_length - 1  # the last position of the text is the first scale's token
        width = config.width
        self.context_norm = RMSNorm(config.text_dim, config.eps) if config.text_normalized else nn.Identity()
        self.context_embed = nn.Linear(config.text_dim, width)
        self.level_embed: nn.Module = (
            SinusoidEmbedding(width) if config.sinusoid_levels else nn.Embedding(len(config.sides), width)
        )
        self.word_embed = nn.Linear(config.code_dim, width)
        self.blocks = nn.ModuleList(HARTBlock(config) for _ in range(config.depth))
        self.head_norm = RMSNorm(width, config.eps)
        self.head_modulation = nn.Linear(width, 2 * width)
        self.head_linear = nn.Linear(width, config.vocabulary)
        self.residual_norm = RMSNorm(width, config.eps)
        self.residual = ResidualDiffusion(
            config.code_dim, width, config.diffusion_width, config.diffusion_depth, config.diffusion_steps
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.word_embed.weight.dtype

    @staticmethod
    def computes_in_dtype(name: str) -> bool:
        if name.startswith("blocks."):
            return not name.endswith(("log_scale", "norm.weight"))
        return name.startswith(("word_embed.", "context_embed.", "residual."))

    def read(self, condition: TextCondition, guided: bool) -> tuple[Tensor, Tensor]:
        """Features [R, T, text_dim] and positions [R, T] of every row."""
        length = self.config.text_length
        rows = [self.positioned(t) for t in condition.text]
        if condition.positions is not None:
            rows = list(zip(condition.text, condition.positions, strict=True))
        if guided:  # no text at all: zeros, all at position 0
            no_text = torch.zeros(length, self.config.text_dim), torch.zeros(length, dtype=torch.long)
            rows += [no_text if n is None else self.positioned(n) for n in condition.negatives]
        text, positions = (torch.stack([t.to(self.device) for t in tensors]) for tensors in zip(*rows, strict=True))
        return text.float(), positions

    def positioned(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Padded features and their positions; a text encoder gives the positions as a last column."""
        if text.shape[1] == self.config.text_dim + 1:
            return text[:, :-1], text[:, -1].long()
        return left_padded(text, self.config.text_length)

    def prepare(self, inputs: tuple[Tensor | None, ...], schedule: Schedule) -> HARTConditioning:
        text, positions = inputs
        assert text is not None
        assert positions is not None
        context = self.context_embed(self.context_norm(text).to(self.dtype)).float()
        pooled = context.amax(1, keepdim=True)  # padding included, as the original does
        scale_shift = self.head_modulation(F.silu(pooled)).unflatten(-1, (2, -1))
        return HARTConditioning(None, context, positions, scale_shift, attention_biases([b.attn for b in self.blocks]))

    def level(self, index: int) -> Tensor:
        """The embedding of a scale, [1, C]; the text has that of the first."""
        return self.level_embed(torch.full((1,), index, device=self.device))  # no copy from the host to wait for

    def embed(self, cond: HARTConditioning, inputs: Tensor | None, scale: Scale) -> Tensor:
        """At the first scale all the text, whose last position predicts the first token."""
        x = cond.context if inputs is None else self.word_embed(inputs.to(self.dtype)).float()
        return x + self.level(scale.index)

    def positions(self, cond: HARTConditioning, scale: Scale) -> Tensor:
        """cos and sin per channel, [R, N, D, 2]; of the text at the first scale."""
        d = self.head_dim
        if scale.index == 0:
            rates = 10000 ** (-2 * torch.arange(d // 2, device=self.device, dtype=torch.float32) / d)
            angle = (cond.text_positions[..., None] * rates).repeat(1, 1, 2)
        else:
            rates = 10000 ** (-4 * torch.arange(d // 4, device=self.device, dtype=torch.float32) / d)
            last = self.config.sides[-1]
            line = [torch.arange(n, device=self.device, dtype=torch.float32) / n * last for n in scale.grid]
            row, column = torch.meshgrid(*line, indexing="ij")
            # The image begins where the text ends. Rows and columns turn different halves of a pair.
            cells = torch.stack((row, column), -1).flatten(0, 1) + cond.text_positions[:, -1, None, None]
            angle = (cells[..., None] * rates).repeat(1, 1, 1, 2).flatten(2)
        return torch.stack((angle.cos(), angle.sin()), dim=-1)

    def block_cond(self, cond: HARTConditioning, layer: int) -> Tensor:
        return cond.biases[layer]

    def head(self, cond: HARTConditioning, x: Tensor, codes: Tensor | None = None) -> Tensor:
        scale, shift = cond.head_modulation[: len(x)].unbind(2)
        return head_logits(self.head_linear, self.head_norm(x) * (1 + scale) + shift, codes)

    def finish(
        self,
        cond: Any,
        x: Tensor,
        drawn: Sampled,
        tokenizer: ImageTokenizer,
        rows: Rows,
        weight: Number,
        noise: NoiseSource,
    ) -> Tensor:
        """The last codes and the residual that diffusion finds for them."""
        token = self.word_embed(tokenizer.codes(drawn.tokens).to(self.dtype)).float()
        condition = self.residual_norm(x + rows.expand_to_rows(token)).to(self.dtype)
        last = len(self.config.sides) - 1
        # At this very weight the original runs its sampler without guidance.
        weight = torch.where(weight == 2, 1.0, weight) if on_device(weight) else 1.0 if weight == 2.0 else weight
        residual = self.residual.sample(
            condition,
            rows.expand_to_rows,
            lambda noise: guide(noise, rows.images, rows.guided, weight),
            lambda name: noise.normal(drawn.codes, last, rows.image_ids, name),
        )
        return drawn.codes + residual

    def schedule(self, size: Size, stride: int) -> Schedule:
        return only_square(self.config.sides, size, stride)

    def guidance(self, value: float | Sequence[float], scales: int) -> tuple[float, ...]:
        weights = ramp(value, scales)
        return (*weights[:-1], weights[-2]) if is_single(value) and scales > 1 else weights

    def progress(self, scales: int) -> tuple[float, ...]:
        """The progress of the scale before at the last one, where the original does not update it."""
        steps = super().progress(scales)
        return (*steps[:-1], steps[-2]) if scales > 1 else steps
