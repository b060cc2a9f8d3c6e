"""Write a model as one safetensors file and a config."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from nextscale.checkpoints.load import Progress, outline
from nextscale.checkpoints.locate import CONFIG_FILE, FORMAT_NAME, WEIGHTS_FILE
from nextscale.checkpoints.paths import present
from nextscale.checkpoints.pretrained import FORMAT_VERSION, Blueprint, Part, describe
from nextscale.checkpoints.scratch import atomic_folder
from nextscale.errors import NextscaleError
from nextscale.io.devices import dtype_name

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def convert(blueprint: Blueprint, out: str | Path, dtype: torch.dtype, progress: Progress | None = None) -> Path:
    """Write a folder `out` that `from_pretrained` reads; nothing appears there before it is complete."""
    out = Path(out)
    if present(out):
        raise NextscaleError(f"{out} exists already; choose a new folder")
    entries = _entries(blueprint.parts, dtype)
    config = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **describe(blueprint), "dtype": dtype_name(dtype)}
    try:
        with atomic_folder(out, (CONFIG_FILE, WEIGHTS_FILE)) as scratch:
            (scratch / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
            with (scratch / WEIGHTS_FILE).open("wb") as file:
                _write(file, entries, progress)
    except OSError as error:  # most of all: a disk that is full
        raise NextscaleError(f"cannot write {out}: {error.strerror or error}") from None
    return out


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written."""

    part: Part
    key: str  # in the source
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _entries(parts: dict[str, Part], dtype: torch.dtype) -> list[TensorEntry]:
    entries = []
    for prefix, part in parts.items():
        module = outline(part.family.module, part.config, part.state, part.names)
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        for key, name in part.names.items():
            target = dtype if module.computes_in_dtype(name) else torch.float32
            entries.append(TensorEntry(part, key, f"{prefix}.{name}", shapes[name], target))
    return sorted(entries, key=lambda e: -e.dtype.itemsize)  # the wider dtype first, so that all is aligned


def _write(file: BinaryIO, entries: list[TensorEntry], progress: Progress | None) -> None:
    """Write the safetensors format a chunk at a time: its own writer wants every tensor in memory at once."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for e in entries:
        start, end = end, end + e.nbytes
        header[e.name] = {"dtype": _DTYPES[e.dtype], "shape": list(e.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for (part, dtype), group in itertools.groupby(entries, key=lambda e: (e.part, e.dtype)):
        for chunk in part.state.chunks([e.key for e in group]):
            for tensor in chunk.values():
                file.write(tensor.to(dtype).flatten().view(torch.uint8).numpy().data)
            if progress:
                progress(sum(part.state.infos[key].nbytes for key in chunk))
