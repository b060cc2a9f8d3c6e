"""Blocks through torch.compile: two functions, one before and one behind the attention, serve all layers."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nextscale.engine.entropy import token_entropy
from nextscale.models.base import Attend, Backbone, Block
from nextscale.models.residual import ResidualStream
from nextscale.runtime.decoder import FastDecode
from nextscale.runtime.eager import Eager
from nextscale.tokenizers.base import ImageTokenizer


def qkv(block: Block, x: Tensor, block_cond: Any) -> Tensor:
    return block.qkv(ResidualStream(x), block_cond)


def behind_attention(
    block: Block, sublayers: Sequence[str], x: Tensor, attn_out: Tensor | None, block_cond: Any
) -> Tensor:
    """Project `attn_out`, if self-attention is run, and run the sublayers behind it."""
    stream = ResidualStream(x)
    if attn_out is not None:
        block.out_proj(stream, attn_out, block_cond)
    for name in sublayers:
        block.sublayer(name, stream, block_cond)
    return stream.sum


def head(backbone: Backbone, cond: Any, x: Tensor) -> Tensor:
    return backbone.head(cond, x)


def compile_copy(function: Any, backend: str, **options: Any) -> Callable[..., Any]:
    """Compile a copy of the function: torch counts how often it compiles a code object, and gives up at eight."""
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    return torch.compile(copy, backend=backend, **options)


class Compiled(Eager):
    name = "compiled"
    packs = False  # compiled blocks read padded tokens

    def __init__(self, backend: str = "inductor") -> None:
        # Blocks of one class share their code: torch treats their weights as inputs.
        self.qkv = compile_copy(qkv, backend, fullgraph=True)
        self.behind_attention = compile_copy(behind_attention, backend, fullgraph=True)
        self._head = compile_copy(head, backend)
        self._entropy = compile_copy(token_entropy, backend)
        self.fast_decode = FastDecode()

    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        return self.fast_decode(tokenizer, features)

    def preview(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        return self.fast_decode(tokenizer, features)

    def head(self, backbone: Backbone, cond: Any, x: Tensor, codes: Tensor | None = None) -> Tensor:
        if codes is not None:
            return super().head(backbone, cond, x, codes)
        x = x.contiguous()
        _mark_dynamic(1, x)
        return self._head(backbone, cond, x)

    def token_entropy(self, logits: Tensor, unit: str = "token") -> Tensor:
        _mark_dynamic(1, logits)
        return self._entropy(logits, unit)

    def run_block(
        self, block: Block, stream: ResidualStream, block_cond: Any, attend: Attend, sublayers: Sequence[str]
    ) -> None:
        x = stream.sum
        _mark_dynamic(1, x)
        attn_out = None
        if sublayers[0] == "self":
            attn_out = attend(block.attn, self.qkv(block, x, block_cond))
            _mark_dynamic(2, attn_out)
            sublayers = sublayers[1:]
        stream.x = self.behind_attention(block, sublayers, x, attn_out, block_cond)


def _mark_dynamic(dim: int, tensor: Tensor) -> None:
    """Share code between numbers of tokens; torch always specializes 1."""
    if tensor.shape[dim] > 1:
        torch._dynamo.mark_dynamic(tensor, dim)
