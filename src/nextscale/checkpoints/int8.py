"""Weights stored as int8: every matrix row has its own scale. Only files are smaller; a model runs as ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nextscale.checkpoints.files import StateFile, TensorInfo
from nextscale.errors import NextscaleError

SCALE_SUFFIX = ".scale"
MIN_QUANTIZED_SIZE = 4096  # tensors with fewer numbers, and vectors, stay in half precision: they cost little


def quantize_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantize matrices to int8 with their scales; the rest becomes float16."""
    quantized = {}
    for key, tensor in state.items():
        if tensor.ndim < 2 or tensor.numel() < MIN_QUANTIZED_SIZE:
            quantized[key] = tensor.half()
            continue
        rows = tensor.float().flatten(1)
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        quantized[key] = (rows / scale).round().to(torch.int8).view(tensor.shape)
        quantized[key + SCALE_SUFFIX] = scale.squeeze(1)
    return quantized


def dequantize(tensor: Tensor, scale: Tensor) -> Tensor:
    return tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))


class Int8State(StateFile):
    """A file with int8 matrices, read as if they were float32."""

    mapped = False  # every tensor is made anew

    def __init__(self, inner: StateFile) -> None:
        self.inner, infos = inner, inner.infos
        self.quantized = {k for k, info in infos.items() if info.dtype == torch.int8 and k + SCALE_SUFFIX in infos}
        for key in self.quantized:
            info, scale = infos[key], infos[key + SCALE_SUFFIX]
            if scale.shape != info.shape[:1] or not scale.dtype.is_floating_point:
                raise NextscaleError(f"{inner.file_of(key)} has no scale for every row of {key!r}")
        shown = {
            key: TensorInfo(info.shape, torch.float32) if key in self.quantized else info
            for key, info in infos.items()
            if key.removesuffix(SCALE_SUFFIX) not in self.quantized or key in self.quantized
        }
        super().__init__(inner.path, shown)

    @property
    def files(self) -> tuple[Path, ...]:
        return self.inner.files

    def file_of(self, key: str) -> Path:
        return self.inner.file_of(key)

    def tensors(self, keys: Sequence[str]) -> dict[str, Tensor]:
        scales = [key + SCALE_SUFFIX for key in keys if key in self.quantized]
        read = self.inner.tensors([*keys, *scales])
        return {k: dequantize(read[k], read[k + SCALE_SUFFIX]) if k in self.quantized else read[k] for k in keys}


def dequantized(state: StateFile) -> StateFile:
    """The state itself, or a view of it without int8 matrices."""
    return Int8State(state) if any(info.dtype == torch.int8 for info in state.infos.values()) else state
