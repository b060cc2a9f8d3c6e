"""Tensors side by side. A GPU's memory is allocated in pieces, and tensors that do not fill one leave gaps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

ALIGNMENT = 256  # bytes
Specs = Sequence[tuple[Sequence[int], torch.dtype]]  # shapes and dtypes


def byte_offsets(specs: Specs) -> list[int]:
    """Where each tensor begins, in bytes, and where the last one ends."""
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in specs)
    return list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def view_tensors(memory: Tensor, specs: Specs) -> list[Tensor]:
    """Tensors in this memory, whose bytes are `byte_offsets(specs)[-1]`."""
    starts = zip(byte_offsets(specs), specs, strict=False)
    return [memory[a : a + math.prod(shape) * d.itemsize].view(d).view(shape) for a, (shape, d) in starts]


@torch.inference_mode(False)
@torch.no_grad()
def flatten_parameters(modules: Iterable[nn.Module]) -> None:
    """Put the weights of each module into one piece of memory, in place. Strides stay as they are. Weights that were
    flattened once stay where they are: graphs know their addresses."""
    for module in modules:
        tensors = list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())
        if len(tensors) < 2 or any(t.nbytes != t.untyped_storage().nbytes() for t in tensors):
            continue  # views of something larger, such as a mapped file, or flattened before
        specs = [(t.shape, t.dtype) for t in tensors]
        memory = torch.empty(byte_offsets(specs)[-1], dtype=torch.uint8, device=tensors[0].device)
        for tensor, view in zip(tensors, view_tensors(memory, specs), strict=True):
            tensor.data = view.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
