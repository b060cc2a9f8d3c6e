"""Weights of a run: one half-precision file per part. The shipped model can be read too, to train it further."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from nextscale.checkpoints.files import open_states
from nextscale.checkpoints.int8 import dequantized


def save(folder: Path, **parts: nn.Module) -> None:
    """`tokenizer`, `backbone` and `text`; each becomes a file of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in parts.items():
        state = {key: p.detach().cpu().half().contiguous() for key, p in module.named_parameters()}
        scratch = folder / f".{name}.safetensors"
        save_file(state, scratch)
        scratch.rename(folder / f"{name}.safetensors")


@torch.no_grad()
def load_into(folder: Path, **parts: nn.Module) -> None:
    for name, module in parts.items():
        own = folder / f"{name}.safetensors"
        prefix = "" if own.exists() else f"{name}."
        state = dequantized(open_states(own if own.exists() else folder / "model.safetensors")[0])
        tensors = state.tensors([f"{prefix}{key}" for key, _ in module.named_parameters()])
        for key, parameter in module.named_parameters():
            parameter.copy_(tensors[f"{prefix}{key}"])
