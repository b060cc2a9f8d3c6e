"""Memory that all shapes of calls share, for one of them is used at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nextscale.io.devices import synchronize
from nextscale.models.flat_parameters import ALIGNMENT

CHUNK = 2**28  # bytes, about: a decoder's maps are as large, and leave such gaps
MIN_FREE = 0.25  # of the device's memory: with less it is scarce


def is_scarce(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free < MIN_FREE * total


class MemoryArena:
    """Chunks that never move. Every shape of call has its tensors there from the first chunk on.

    Decoders work there, too, when the caches are of no use any more: chunks are taken from what decoders had while they
    were captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        # Graphs share their memory, which torch only allows those that were captured on one stream.
        self.stream: Any = torch.cuda.Stream(device) if cuda else None
        self.scale_pool: Any = torch.cuda.graph_pool_handle() if cuda else None  # of captured scales
        self.chunk_pool: Any = torch.cuda.MemPool() if cuda else None  # of chunks and decoders
        self.chunks: list[Tensor] = []
        self.workspace_bytes = 0  # that graphs of scales have had in one piece

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        if self.chunk_pool is None:
            yield
        else:
            # torch gives freed memory only to the stream that it was taken for.
            with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.chunk_pool):
                yield

    def _add_chunk(self, size: int) -> None:
        """Allocate a chunk for some tensors of this size: those of all layers have the same."""
        size *= max(CHUNK // size, 1)
        with self._allocating():
            self.chunks.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        synchronize(self.device)

    def reserve_workspace(self, size: int) -> None:
        """Allocate it in one piece, while something is captured: before graphs ask for it bit by bit, for what early
        scales ask for is too small for later ones."""
        if size > self.workspace_bytes:
            torch.empty(size, dtype=torch.uint8, device=self.device)
            self.workspace_bytes = size

    def allocator(self) -> Callable[[Sequence[int], torch.dtype], Tensor]:
        """Make a function that gives one tensor after the other, from the first chunk on; none overlap."""
        number = at = 0

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            nonlocal number, at
            if not math.prod(shape):
                return torch.empty(*shape, dtype=dtype, device=self.device)
            size = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            while number < len(self.chunks) and at + size > self.chunks[number].nbytes:
                number, at = number + 1, 0
            if number == len(self.chunks):
                self._add_chunk(size)
            found = self.chunks[number][at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
            at += size
            return found

        return allocate
