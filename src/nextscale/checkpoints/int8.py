"""Weights stored in 8 bits: every matrix row has its own scale. Only storage is smaller; a model runs as ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nextscale.checkpoints.files import StateFile, TensorInfo
from nextscale.errors import NextscaleError

SUFFIX = ".scale"
SMALLEST = 4096  # tensors with fewer numbers, and vectors, stay in half precision: they cost little


def pack(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """int8 matrices and their scales, the rest as float16."""
    packed = {}
    for key, tensor in state.items():
        if tensor.ndim < 2 or tensor.numel() < SMALLEST:
            packed[key] = tensor.half()
            continue
        rows = tensor.float().flatten(1)
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        packed[key] = (rows / scale).round().to(torch.int8).view(tensor.shape)
        packed[key + SUFFIX] = scale.squeeze(1)
    return packed


def unpack(tensor: Tensor, scale: Tensor) -> Tensor:
    return tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))


class Int8State(StateFile):
    """A file with packed matrices, read as if they were float32."""

    mapped = False  # every tensor is made anew

    def __init__(self, inner: StateFile) -> None:
        self.inner = inner
        self.packed = {k for k, info in inner.infos.items() if info.dtype == torch.int8 and k + SUFFIX in inner.infos}
        for key in self.packed:
            info, scale = inner.infos[key], inner.infos[key + SUFFIX]
            if scale.shape != info.shape[:1] or not scale.dtype.is_floating_point:
                raise NextscaleError(f"{inner.file_of(key)} has no scale for every row of {key!r}")
        infos = {
            key: TensorInfo(info.shape, torch.float32) if key in self.packed else info
            for key, info in inner.infos.items()
            if key.removesuffix(SUFFIX) not in self.packed or key in self.packed
        }
        super().__init__(inner.path, infos)

    @property
    def files(self) -> tuple[Path, ...]:
        return self.inner.files

    def file_of(self, key: str) -> Path:
        return self.inner.file_of(key)

    def tensors(self, keys: Sequence[str]) -> dict[str, Tensor]:
        scales = [key + SUFFIX for key in keys if key in self.packed]
        read = self.inner.tensors([*keys, *scales])
        return {key: unpack(read[key], read[key + SUFFIX]) if key in self.packed else read[key] for key in keys}


def opened(state: StateFile) -> StateFile:
    """The state itself, or a view of it without packed matrices."""
    return Int8State(state) if any(info.dtype == torch.int8 for info in state.infos.values()) else state
