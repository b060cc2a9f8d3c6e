"""Memory in which nothing can be overlooked, for kernels in Triton's interpreter.

What a kernel makes is NaN until it is written, and its inputs are surrounded by NaN, its outputs by huge numbers: what
was never written, or was read from beside a tensor, spoils the result, and what was written there is seen at the end.
Importing this skips a test file where kernels cannot be interpreted.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from nextscale.methods.selection import Packed

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on the CPU with TRITON_INTERPRET=1 only", allow_module_level=True)

MARGIN = 1 << 14  # bytes on either side
UNKNOWN, HUGE = 0xFF, 0x7F  # bytes: NaN in every format; and what no NaN that was read beside an input looks like
FIELDS: list[tuple[Tensor, int]] = []
empty, empty_like = torch.empty, torch.empty_like


def fenced(like: Tensor, copy: bool = True) -> Tensor:
    """The same tensor, or one like it that nobody has written yet, in a field of its own."""
    span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
    size = span * like.element_size()
    around = UNKNOWN if copy else HUGE
    field = empty(size + 2 * MARGIN, dtype=torch.uint8).fill_(around)
    FIELDS.append((field, around))
    field[MARGIN : MARGIN + size] = UNKNOWN
    inside = field[MARGIN : MARGIN + size].view(like.dtype).as_strided(like.shape, like.stride())
    if copy:
        return inside.copy_(like)
    return inside if like.dtype.is_floating_point else inside.fill_(77)  # no slot of anything here


def some(*shape: int, by: float = 1.0, plus: float = 0.0) -> Tensor:
    """Random numbers, fenced."""
    return fenced(torch.randn(*shape) * by + plus)


def whole(*numbers: int) -> Tensor:
    return fenced(torch.tensor(numbers, dtype=torch.long))


def some_tokens(cells: int, counts: list[int], room: int | None = None) -> tuple[Packed, list[list[int]]]:
    """So many random cells of every row, packed, and what they are. Behind them is room for other tokens, by default
    for all, whose cells nobody may read."""
    kept = [sorted(torch.randperm(cells)[:n].tolist()) for n in counts]
    total = sum(counts)
    cell = torch.full((len(counts) * cells if room is None else room,), -(1 << 30), dtype=torch.int32)
    cell[1::2] = 1 << 30
    cell[:total] = torch.tensor([row * cells + i for row, of in enumerate(kept) for i in of], dtype=torch.int32)
    slot = torch.full((len(counts) * cells,), -1, dtype=torch.int32)
    slot[cell[:total].long()] = torch.arange(total, dtype=torch.int32)
    start = torch.tensor([sum(counts[:row]) for row in range(len(counts) + 1)], dtype=torch.int32)
    return Packed(fenced(cell), fenced(start), fenced(slot.view(len(counts), cells))), kept


@contextmanager
def fences(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test of this name, whose random numbers are its own."""
    torch.manual_seed(zlib.crc32(name.encode()))
    FIELDS.clear()
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: fenced(empty(*size, **kind), copy=False))
    monkeypatch.setattr(torch, "empty_like", lambda *given, **kind: fenced(empty_like(*given, **kind), copy=False))
    yield
    for field, around in FIELDS:
        beside = torch.cat((field[:MARGIN], field[-MARGIN:]))
        assert (beside == around).all(), "something was written beside a tensor"
    FIELDS.clear()
