"""Weights of recorded cases that are drawn again are those that were recorded."""

import json
import platform
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.pipelines import DATA
from support.weights import digest

FILES = json.loads((DATA / "weights.json").read_text())


@pytest.mark.parametrize("name", FILES)
def test_weights_are_drawn_as_they_were_recorded(name: str) -> None:
    tensors = load_file(Path(DATA / f"{name}.safetensors"))
    assert all(torch.isfinite(t).all() for key, t in tensors.items() if not key.endswith("attn_bias_for_masking"))
    if platform.machine() in ("x86_64", "AMD64"):  # elsewhere a last bit may be another: verify allows for it
        assert digest(tensors) == FILES[name]["sha256"]
