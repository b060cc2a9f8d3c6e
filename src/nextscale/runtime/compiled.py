"""Blocks through torch.compile: two functions, one before and one behind the attention, serve all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nextscale.kv import Memory
from nextscale.models.base import Block
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


class Compiled(Eager):
    name = "compiled"

    def __init__(self, backend: str = "inductor") -> None:
        # Blocks of one class share their code: torch treats their weights as inputs.
        self.ask = torch.compile(ask, backend=backend, fullgraph=True)
        self.rest = torch.compile(rest, backend=backend, fullgraph=True)
        self.decoder: GPUDecoder | None = None

    def reset(self) -> None:
        self.decoder = None

    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        if self.decoder is None:
            self.decoder = GPUDecoder(tokenizer.decoder)
        return tokenizer.decode(features, self.decoder)

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
