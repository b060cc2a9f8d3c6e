"""Tensors side by side. A GPU's memory is dealt out in pieces, and tensors that do not fill one leave holes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

ALIGNED = 256  # bytes
Like = Sequence[tuple[Sequence[int], torch.dtype]]  # shapes and dtypes


def ends(like: Like) -> list[int]:
    """Where each tensor begins, in bytes, and where the last one ends."""
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in like)
    return list(itertools.accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))


def divide(memory: Tensor, like: Like) -> list[Tensor]:
    """Tensors in this memory, whose bytes are `ends(like)[-1]`."""
    parts = [memory[a : a + math.prod(s) * d.itemsize].view(d) for a, (s, d) in zip(ends(like), like, strict=False)]
    return [part.view(shape) for part, (shape, _) in zip(parts, like, strict=True)]


@torch.inference_mode(False)
@torch.no_grad()
def pack(modules: Iterable[nn.Module]) -> None:
    """Put the weights of each module into one piece of memory, in place. Strides stay as they are. What was packed
    once stays where it is: graphs know the place."""
    for module in modules:
        tensors = list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())
        if len(tensors) < 2 or any(t.nbytes != t.untyped_storage().nbytes() for t in tensors):
            continue  # views of something larger, such as a mapped file or an earlier packing
        like = [(t.shape, t.dtype) for t in tensors]
        memory = torch.empty(ends(like)[-1], dtype=torch.uint8, device=tensors[0].device)
        for tensor, place in zip(tensors, divide(memory, like), strict=True):
            tensor.data = place.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
