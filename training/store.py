"""Weights of a run: half-precision files per part. The shipped model can be read too, to train it further."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nextscale.checkpoints.files import open_states
from nextscale.checkpoints.int8 import dequantized

LARGEST = 15 * 2**20  # bytes of a file, so that it can be carried between machines


def save_parts(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """One file, or several `name-1`, `name-2`, ... where that would be too large."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if size + tensor.nbytes > LARGEST:
            parts.append({})
            size = 0
        parts[-1][key] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    names = [name] if len(parts) == 1 else [f"{name}-{i}" for i in range(1, len(parts) + 1)]
    for stem, part in zip(names, parts, strict=True):
        save_file(part, folder / f".{stem}.safetensors")
    for old in files_of(folder, name):
        old.unlink()
    for stem in names:
        (folder / f".{stem}.safetensors").rename(folder / f"{stem}.safetensors")


def files_of(folder: Path, name: str) -> list[Path]:
    return [*folder.glob(f"{name}.safetensors"), *sorted(folder.glob(f"{name}-[0-9]*.safetensors"))]


def read_parts(folder: Path, name: str) -> dict[str, Tensor]:
    return {key: tensor for path in files_of(folder, name) for key, tensor in load_file(path).items()}


def save(folder: Path, **parts: nn.Module) -> None:
    """`tokenizer`, `backbone` and `text`."""
    for name, module in parts.items():
        save_parts(folder, name, {key: p.half() for key, p in module.named_parameters()})


@torch.no_grad()
def load_into(folder: Path, **parts: nn.Module) -> None:
    for name, module in parts.items():
        tensors, prefix = read_parts(folder, name), ""
        if not tensors:
            prefix = f"{name}."
            state = dequantized(open_states(folder / "model.safetensors")[0])
            tensors = state.tensors([f"{prefix}{key}" for key, _ in module.named_parameters()])
        for key, parameter in module.named_parameters():
            parameter.copy_(tensors[f"{prefix}{key}"])
