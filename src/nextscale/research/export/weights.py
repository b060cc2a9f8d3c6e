"""Which weights made the images: their SHA-256."""

from __future__ import annotations

import hashlib

import torch

from nextscale.errors import NextscaleError
from nextscale.io.progress import bar
from nextscale.pipeline import Pipeline

CHUNK = 2**24


def weights_sha256(pipe: Pipeline, show: bool | None = None) -> list[str]:
    """Hash each file, as the hub does, or all parameters of weights that were never in files."""
    if not pipe.weight_files:
        return [_of_parameters(pipe)]
    try:
        with bar("hash weights", sum(f.stat().st_size for f in pipe.weight_files), show, data=True) as advance:
            sums = []
            for path in pipe.weight_files:
                running = hashlib.sha256()
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK):
                        running.update(chunk)
                        advance(len(chunk))
                sums.append(running.hexdigest())
    except OSError as error:
        raise NextscaleError(f"the weights {error.filename} can no longer be read: {error.strerror}") from None
    return sums


def _of_parameters(pipe: Pipeline) -> str:
    running = hashlib.sha256()
    for module in (pipe.backbone, pipe.tokenizer):
        for name, tensor in sorted(module.state_dict().items()):
            running.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            running.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return running.hexdigest()
