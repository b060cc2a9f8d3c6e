"""Blocks through torch.compile: two functions, one before and one behind the attention, serve all layers."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nextscale.cache.kv import Memory
from nextscale.engine.entropy import token_entropy
from nextscale.methods.selection import Selection
from nextscale.models.base import Backbone, Block
from nextscale.models.residual import Stream
from nextscale.runtime.decoder import FastDecode
from nextscale.runtime.eager import Eager
from nextscale.tokenizers.base import ImageTokenizer


def ask(block: Block, x: Tensor, block_cond: Any) -> Tensor:
    return block.ask(Stream(x), block_cond)


def rest(block: Block, parts: Sequence[str], x: Tensor, seen: Tensor | None, block_cond: Any) -> Tensor:
    """What self-attention saw, if it is among the parts, and the parts behind it."""
    stream = Stream(x)
    if seen is not None:
        block.answer(stream, seen, block_cond)
    for part in parts:
        block.part(part, stream, block_cond)
    return stream.sum


def head(backbone: Backbone, cond: Any, x: Tensor) -> Tensor:
    return backbone.head(cond, x)


def compiled(function: Any, backend: str, **options: Any) -> Callable[..., Any]:
    """torch counts how often it has compiled a code object, and gives up at eight: every executor has its own copy."""
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    return torch.compile(copy, backend=backend, **options)


class Compiled(Eager):
    name = "compiled"
    packs = False  # a compiled block knows nothing of it

    def __init__(self, backend: str = "inductor") -> None:
        # Blocks of one class share their code: torch treats their weights as inputs.
        self.ask = compiled(ask, backend, fullgraph=True)
        self.rest = compiled(rest, backend, fullgraph=True)
        self._head = compiled(head, backend)
        self._entropy = compiled(token_entropy, backend)
        self.fast_decode = FastDecode()

    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        return self.fast_decode(tokenizer, features)

    def head(self, backbone: Backbone, cond: Any, x: Tensor, codes: Tensor | None = None) -> Tensor:
        if codes is not None:
            return super().head(backbone, cond, x, codes)
        x = x.contiguous()
        _any_number(1, x)
        return self._head(backbone, cond, x)

    def token_entropy(self, logits: Tensor, unit: str = "token") -> Tensor:
        _any_number(1, logits)
        return self._entropy(logits, unit)

    def through(
        self,
        block: Block,
        parts: Sequence[str],
        stream: Stream,
        block_cond: Any,
        positions: Tensor | None,
        memory: Memory,
        chosen: Selection | None = None,
    ) -> None:
        x = stream.sum
        _any_number(1, x)
        seen = None
        if parts[0] == "self":
            seen = memory.see(block.attn, self.ask(block, x, block_cond), positions, chosen)
            _any_number(2, seen)
            parts = parts[1:]
        stream.x = self.rest(block, parts, x, seen, block_cond)


def _any_number(dim: int, tensor: Tensor) -> None:
    """No code of its own for every number of tokens; torch always gives 1 its own."""
    if tensor.shape[dim] > 1:
        torch._dynamo.mark_dynamic(tensor, dim)
