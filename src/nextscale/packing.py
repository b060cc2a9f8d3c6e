"""Weights side by side. A GPU's memory is dealt out in pieces, and tensors that do not fill one leave holes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

ALIGNED = 256  # bytes


@torch.inference_mode(False)
@torch.no_grad()
def pack(modules: Iterable[nn.Module]) -> None:
    """Put the weights of each module into one piece of memory, in place. Strides stay as they are."""
    for module in modules:
        tensors = list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())
        if not tensors or any(t.nbytes != t.untyped_storage().nbytes() for t in tensors):
            continue  # views of something larger, such as a mapped file or an earlier packing
        sizes = [-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        for tensor, part in zip(tensors, memory.split(sizes), strict=True):
            place = part[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            tensor.data = place.copy_(tensor)
