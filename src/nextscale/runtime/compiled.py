"""Blocks through torch.compile: two functions, one before and one behind the attention, serve all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nextscale.entropy import token_entropy
from nextscale.kv import Memory
from nextscale.models.base import Backbone, Block
from nextscale.runtime.decoder import GPUDecoder
from nextscale.runtime.eager import Eager
from nextscale.tokenizers.base import ImageTokenizer


def ask(block: Block, x: Tensor, given: Any) -> Tensor:
    return block.ask(x, given)


def rest(block: Block, parts: Sequence[str], x: Tensor, seen: Tensor | None, given: Any) -> Tensor:
    """What self-attention saw, if it is among the parts, and the parts behind it."""
    if seen is not None:
        x = x + block.answer(seen, given)
    for part in parts:
        x = x + block.part(part, x, given)
    return x


def head(backbone: Backbone, state: Any, x: Tensor) -> Tensor:
    return backbone.head(state, x)


class Compiled(Eager):
    name = "compiled"

    def __init__(self, backend: str = "inductor") -> None:
        # Blocks of one class share their code: torch treats their weights as inputs.
        self.ask = torch.compile(ask, backend=backend, fullgraph=True)
        self.rest = torch.compile(rest, backend=backend, fullgraph=True)
        self._head = torch.compile(head, backend=backend)
        self._entropy = torch.compile(token_entropy, backend=backend)
        self.decoder: GPUDecoder | None = None

    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        if self.decoder is None:
            self.decoder = GPUDecoder(tokenizer.decoder)
        return tokenizer.decode(features, self.decoder)

    def head(self, backbone: Backbone, state: Any, x: Tensor, codes: Tensor | None = None) -> Tensor:
        if codes is not None:
            return super().head(backbone, state, x, codes)
        x = x.contiguous()
        _any_number(1, x)
        return self._head(backbone, state, x)

    def token_entropy(self, logits: Tensor, unit: str = "token") -> Tensor:
        _any_number(1, logits)
        return self._entropy(logits, unit)

    def through(
        self,
        block: Block,
        parts: Sequence[str],
        x: Tensor,
        given: Any,
        positions: Tensor | None,
        memory: Memory,
        count: Tensor | None = None,
    ) -> Tensor:
        _any_number(1, x)
        if parts[0] != "self":
            return self.rest(block, parts, x, None, given)
        seen = memory.see(block.attn, self.ask(block, x, given), positions, count)
        _any_number(2, seen)
        return self.rest(block, parts[1:], x, seen, given)


def _any_number(dim: int, tensor: Tensor) -> None:
    """No code of its own for every number of tokens; torch always gives 1 its own."""
    if tensor.shape[dim] > 1:
        torch._dynamo.mark_dynamic(tensor, dim)
