"""Weights of the recorded cases, which are files of their own only after this was run:

    python tests/support/weights.py

Nearly every tensor was drawn from a seeded generator, in the order of the names. Drawn again it is the same, bit for
bit, and `data/weights.json` is 200 times smaller: [shape, factor, divisor, term] of each. A tensor with a shape alone
was changed after it had been drawn; it is in `data/weights.safetensors`, as are integers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DATA = Path(__file__).parents[1] / "data"


def draw(streams: list[dict[str, Any]], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, of which some are `stored`."""
    tensors = dict(stored)
    for stream in streams:
        generator = torch.Generator().manual_seed(stream["seed"])
        for name, (shape, *numbers) in stream["tensors"].items():
            if numbers == [0, 1, 0]:  # nothing was drawn
                tensors[name] = torch.zeros(shape)
                continue
            noise = torch.randn(shape, generator=generator)
            if name not in stored:
                factor, divisor, term = numbers
                tensors[name] = noise * factor / divisor + term
    for name in [name for name in tensors if name.endswith("lvl_1L")]:
        later = tensors[name].mT < tensors[name]
        mask = torch.zeros(later.shape).masked_fill(later, -torch.inf)
        tensors[name.replace("lvl_1L", "attn_bias_for_masking")] = mask[None, None]
    return tensors


def digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].numpy().tobytes())
    return found.hexdigest()


def write_missing() -> None:
    """Write the files that are not there yet."""
    stored = load_file(DATA / "weights.safetensors")
    for name, file in json.loads((DATA / "weights.json").read_text()).items():
        path = DATA / f"{name}.safetensors"
        if not path.exists():
            own = {key.removeprefix(f"{name}/"): t for key, t in stored.items() if key.startswith(f"{name}/")}
            scratch = path.with_suffix(f".{os.getpid()}")  # several processes may do this at once
            save_file(draw(file["streams"], own), scratch)
            scratch.replace(path)


if __name__ == "__main__":
    write_missing()
