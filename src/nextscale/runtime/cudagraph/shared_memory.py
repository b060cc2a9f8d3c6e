"""Memory that the programs of all shapes of calls share, for one of them is at work at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nextscale.io.devices import wait_for
from nextscale.models.packing import ALIGNED

CHUNK = 2**28  # bytes, about: a decoder's maps are as large, and leave such holes


class Ground:
    """Chunks that never move. Every program has its tensors there from the first chunk on, beside nobody else's.

    Decoders work there, too, when the caches are of no use any more: what they had while they were captured is where
    chunks are taken from.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        # Graphs share their memory, which torch only allows those that were captured on one stream.
        self.side: Any = torch.cuda.Stream(device) if cuda else None
        self.pool: Any = torch.cuda.graph_pool_handle() if cuda else None  # of captured scales
        self.reserve: Any = torch.cuda.MemPool() if cuda else None  # of chunks and decoders
        self.chunks: list[Tensor] = []
        self.working = 0  # bytes that graphs of scales have had in one piece

    @contextmanager
    def allocating(self) -> Iterator[None]:
        if self.reserve is None:
            yield
        else:
            # torch gives freed memory only to the stream that it was taken for.
            with torch.cuda.stream(self.side), torch.cuda.use_mem_pool(self.reserve):
                yield

    def add(self, size: int) -> None:
        """A chunk that has room for some tensors of this size: those of all layers have the same."""
        size *= max(CHUNK // size, 1)
        with self.allocating():
            self.chunks.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        wait_for(self.device)

    def make_working_memory(self, size: int) -> None:
        """In one piece, while something is captured: before graphs ask for it bit by bit, for what early scales ask
        for is too small for later ones."""
        if size > self.working:
            torch.empty(size, dtype=torch.uint8, device=self.device)
            self.working = size

    def share(self) -> Callable[[Sequence[int], torch.dtype], Tensor]:
        """Gives one tensor after the other, none of which lies in another one's place."""
        number = at = 0

        def take(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            nonlocal number, at
            if not math.prod(shape):
                return torch.empty(*shape, dtype=dtype, device=self.device)
            size = -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
            while number < len(self.chunks) and at + size > self.chunks[number].nbytes:
                number, at = number + 1, 0
            if number == len(self.chunks):
                self.add(size)
            found = self.chunks[number][at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
            at += size
            return found

        return take
