"""The interface of backbones: weights and pure functions. Nothing is kept between calls."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from nextscale.cache.kv import BlockCausalAttention
from nextscale.engine.schedule import Scale, Schedule, Size
from nextscale.kernels import dispatch
from nextscale.kernels.flash_attention import HEAD_DIMS
from nextscale.models.residual import ResidualStream

if TYPE_CHECKING:
    from nextscale.engine.guidance import Number
    from nextscale.engine.rng import NoiseSource
    from nextscale.engine.rows import Rows
    from nextscale.engine.sampling import Sampled
    from nextscale.kernels.logit_lens import BitHead
    from nextscale.models.layers import SelfAttention
    from nextscale.tokenizers.base import ImageTokenizer

# Queries, keys and values of new tokens [R, K, 3, H, D] -> attention over all that they can see, [R, H, K, D].
Attend = Callable[["SelfAttention", Tensor], Tensor]
S = TypeVar("S", bound="Conditioning")


def per_row() -> Any:
    """A field of a `Conditioning` whose tensors have one entry per guidance row."""
    return dataclasses.field(metadata={"per_row": True})


def shared() -> Any:
    """A field of a `Conditioning` that all rows have in common."""
    return dataclasses.field()


@dataclasses.dataclass(frozen=True)
class Conditioning:
    """What stays the same in a run: conditions, modulation, text keys and values, rotary tables."""

    text_lengths: Tensor | None = per_row()  # [R] keys that cross-attention sees; None without it

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""

        def walk(value: Any) -> list[Tensor]:
            if isinstance(value, (list, tuple)):
                return [t for v in value for t in walk(v)]
            return [] if value is None else [value]

        return [t for f in dataclasses.fields(self) for t in walk(getattr(self, f.name))]

    def take(self: S, rows: Tensor | slice) -> S:
        """The conditioning of some rows."""

        def pick(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [pick(v) for v in value]
            return None if value is None else value[rows]

        chosen = {f.name: pick(getattr(self, f.name)) for f in dataclasses.fields(self) if f.metadata.get("per_row")}
        return dataclasses.replace(self, **chosen)


class Block(nn.Module, ABC):
    """A layer. It is passed what it reads of the conditioning, so that one compiled function fits all layers."""

    attn: SelfAttention

    def forward(self, stream: ResidualStream, block_cond: Any, attend: Attend, sublayers: Sequence[str]) -> None:
        """Add what these sublayers make of the stream."""
        for name in sublayers:
            if name == "self":
                self.out_proj(stream, attend(self.attn, self.qkv(stream, block_cond)), block_cond)
            else:
                self.sublayer(name, stream, block_cond)

    @abstractmethod
    def qkv(self, stream: ResidualStream, block_cond: Any) -> Tensor:
        """Queries, keys and values [R, K, 3, H, D] of the stream's tokens, as `attn.split` reads them."""

    @abstractmethod
    def out_proj(self, stream: ResidualStream, attn_out: Tensor, block_cond: Any) -> None:
        """Add the projected output [R, H, K, D] of self-attention."""

    @abstractmethod
    def sublayer(self, name: str, stream: ResidualStream, block_cond: Any) -> None:
        """Add what another sublayer makes of the stream."""


def supports_packed(backbone: Backbone) -> bool:
    """Whether there are kernels for the layers on packed tokens. Float32 would lose digits there."""
    known = backbone.dtype in dispatch.HALF and backbone.head_dim in HEAD_DIMS
    return known and dispatch.enabled_on(backbone.device)


class Backbone(nn.Module, ABC):
    """A next-scale transformer. R rows = the conditional rows of all images, then the unconditional ones."""

    family: ClassVar[str]
    prompts: ClassVar[str]  # what a condition is made of: "label" or "text"
    sublayers: ClassVar[tuple[str, ...]]  # of a block, in order; methods select tokens for each
    config: Any
    blocks: Any  # a ModuleList of Block
    depth: int
    width: int
    heads: int
    hidden: int  # width inside the MLP
    mlp_matrices: ClassVar[int] = 2  # a gated MLP has 3
    context: int = 0  # tokens that run in front of the first scale's own
    token_shape: tuple[int, ...]  # () for an index, (d,) for d bits
    token_values: int  # a token, or a bit of it, lies in 0..token_values - 1

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the blocks' matrix products. The residual stream and the logits are always float32."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @staticmethod
    @abstractmethod
    def computes_in_dtype(name: str) -> bool:
        """Whether a parameter is stored in the compute dtype; the others stay float32."""

    @abstractmethod
    def read(self, condition: Any, guided: bool) -> tuple[Tensor | None, ...]:
        """A condition as tensors, one entry per row; with `guided` there are unconditional rows too."""

    @abstractmethod
    def prepare(self, inputs: tuple[Tensor | None, ...], schedule: Schedule) -> Any:
        """The conditioning of a run from what was read; on the device alone."""

    def conditioning(self, condition: Any, schedule: Schedule, guided: bool) -> Any:
        """The conditioning of a run."""
        return self.prepare(self.read(condition, guided), schedule)

    @abstractmethod
    def embed(self, cond: Any, inputs: Tensor | None, scale: Scale) -> Tensor:
        """The input of the first block, [R, N, C]. `inputs` [R, N, d] is the map so far; None at the first scale."""

    @abstractmethod
    def positions(self, cond: Any, scale: Scale) -> Tensor | None:
        """Position data of every token, [1, N, ...], which follows the tokens that a method keeps."""

    @abstractmethod
    def block_cond(self, cond: Any, layer: int) -> Any:
        """What block `layer` reads of the conditioning."""

    @abstractmethod
    def head(self, cond: Any, x: Tensor, codes: Tensor | None = None) -> Tensor:
        """Logits in float32: [R, N, V] for a codebook, [R, N, d, 2] for bits.

        x may hold the first rows only. `codes` [R, n] asks for the logits of some codes; all are an answer too.
        """

    def bit_head(self, cond: Any, images: int) -> BitHead:
        """The head of the conditional rows, of a model of bits, in a form that a kernel reads."""
        raise NotImplementedError

    @abstractmethod
    def schedule(self, size: Size, stride: int) -> Schedule:
        """The grids of an image; `stride` is the tokenizer's pixels per token side."""

    @abstractmethod
    def guidance(self, value: float | Sequence[float], scales: int) -> tuple[float, ...]:
        """The user's guidance_scale, in this family's convention, as one weight per scale (1 = none)."""

    def progress(self, scales: int) -> tuple[float, ...]:
        """How far each scale is, from 0 at the first to 1 at the last; this sets the smoothing."""
        return tuple(k / max(scales - 1, 1) for k in range(scales))

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
        """The codes that the last scale adds, [B, N, d]; x [R, N, C] is the output of its last block."""
        return drawn.codes

    @property
    def logits_per_token(self) -> int:
        return math.prod(self.token_shape) * self.token_values

    def head_flops(self, tokens: int) -> int:
        """Multiply-adds x 2 of the output head."""
        return 2 * tokens * self.width * self.logits_per_token

    def flops(self, sublayer: str, tokens: int, keys: int) -> int:
        """Multiply-adds x 2 of a sublayer for `tokens` queries over `keys` keys (text keys for cross-attention)."""
        if sublayer == "self":
            return 2 * tokens * 4 * self.width**2 + 4 * tokens * keys * self.width
        return 2 * self.mlp_matrices * tokens * self.width * self.hidden

    def teacher_forced(self, cond: Any, inputs: Sequence[Tensor | None], schedule: Schedule) -> Tensor:
        """Logits of all scales in one block-causal pass over the maps that preceded each scale."""
        pairs = list(zip(schedule, inputs, strict=True))
        x = torch.cat([self.embed(cond, before, scale) for scale, before in pairs], dim=1)
        tables = [self.positions(cond, scale) for scale in schedule]
        positions = None if tables[0] is None else torch.cat([t for t in tables if t is not None], dim=1)
        context = x.shape[1] - schedule.tokens
        attend = functools.partial(BlockCausalAttention(schedule, context).attend, positions=positions)
        stream = ResidualStream(x)
        for layer, block in enumerate(self.blocks):
            block(stream, self.block_cond(cond, layer), attend, self.sublayers)
        return self.head(cond, stream.sum[:, context:])
