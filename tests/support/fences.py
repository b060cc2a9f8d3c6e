"""Fenced memory for kernels in Triton's interpreter, in which no fault stays hidden.

Outputs of a kernel are NaN until they are written; NaN surrounds its inputs, and huge numbers its outputs. So numbers
that were never written, or read from beside a tensor, spoil the result, and a check at the end finds those that were
written there. Importing this skips a test file where kernels cannot be interpreted.
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
    """A copy of the tensor, or one like it that is not written yet, in a field of its own."""
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


def some_tokens(cells: int, counts: list[int], capacity: int | None = None) -> tuple[Packed, list[list[int]]]:
    """So many random cells of every row, packed, and which. Behind them is a capacity for other tokens, by default for
    all, whose cells no kernel may read."""
    kept = [sorted(torch.randperm(cells)[:n].tolist()) for n in counts]
    total = sum(counts)
    cell = torch.full((len(counts) * cells if capacity is None else capacity,), -(1 << 30), dtype=torch.int32)
    cell[1::2] = 1 << 30
    cell[:total] = torch.tensor([row * cells + i for row, of in enumerate(kept) for i in of], dtype=torch.int32)
    slot = torch.full((len(counts) * cells,), -1, dtype=torch.int32)
    slot[cell[:total].long()] = torch.arange(total, dtype=torch.int32)
    start = torch.tensor([sum(counts[:row]) for row in range(len(counts) + 1)], dtype=torch.int32)
    return Packed(fenced(cell), fenced(start), fenced(slot.view(len(counts), cells))), kept


@contextmanager
def fences(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fence what a test of this name makes; its random numbers depend on the name."""
    torch.manual_seed(zlib.crc32(name.encode()))
    FIELDS.clear()
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: fenced(empty(*size, **kwargs), copy=False))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: fenced(empty_like(*args, **kwargs), copy=False))
    yield
    for field, around in FIELDS:
        beside = torch.cat((field[:MARGIN], field[-MARGIN:]))
        assert (beside == around).all(), "something was written beside a tensor"
    FIELDS.clear()
