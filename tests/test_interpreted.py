"""Triton's kernels on the CPU, in Triton's interpreter (`make test-kernels`, some minutes).

Whole runs with the kernels that a run in float32 uses. Those in 16 bits need a GPU; some of them are tried alone, for
the interpreter does not mind float32.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import ask
from nextscale import NOVA
from nextscale.kernels import absorbed, attention, conv, lens, norm
from nextscale.kernels.fp8 import Reads
from nextscale.testing import tiny_infinity

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on the CPU with TRITON_INTERPRET=1 only", allow_module_level=True)

METHODS = {
    "none": None,
    "nova": NOVA(t_est=2, alpha=10, max_layer_keep=0.3),
    "nova, zero": NOVA(t_est=2, alpha=10, max_layer_keep=0.3, cache="zero"),
    "nova, nearest": NOVA(t_est=4, alpha=10, restore_mode="nearest"),
}
# Where somebody asks whether a kernel takes a tensor: each of them would say no on a CPU.
ASKED = (
    "nextscale.methods.base.puts",
    "nextscale.methods.cached.puts",
    "nextscale.methods.selection.selects",
    "nextscale.methods.linkage.selects",
    "nextscale.runtime.eager.looks",
    "nextscale.kernels.modulate.fuses",
    "nextscale.models.stream.fuses",
    "nextscale.kernels.exact.takes",
    "nextscale.guidance.takes",
    "nextscale.sampling.takes",
    "nextscale.entropy.takes",
    "nextscale.tokenizers.bsq.takes",
)


# Who must have been at work then, by method.
USED = {
    "nextscale.sampling.fused_draw": METHODS,
    "nextscale.guidance.fused_combine": METHODS,
    "nextscale.kernels.exact.fused_linear": METHODS,
    "nextscale.tokenizers.bsq.fused_add": METHODS,
    "nextscale.tokenizers.bsq.fused_inputs": METHODS,
    "nextscale.entropy.fused_entropy": ("nova", "nova, zero", "nova, nearest"),
    "nextscale.kernels.lens.fused_lens": ("nova", "nova, zero", "nova, nearest"),
    "nextscale.kernels.lens.fused_lens_of_filled": ("nova", "nova, zero", "nova, nearest"),
    "nextscale.methods.cached.fused_restore": ("nova", "nova, nearest"),
    "nextscale.methods.cached.fused_record": ("nova", "nova, nearest"),
    "nextscale.methods.base.fused_put": ("nova, zero",),
}


def kept(out) -> list:
    return [[e["kept"] for e in s["layers"]] for i in out.trace.to_dict()["images"] for s in i["scales"]]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("patchify", [False, True], ids=["cells", "patches"])
def test_kernels_give_the_tokens_of_torch(name: str, patchify: bool, monkeypatch) -> None:
    pipe, method = tiny_infinity(patchify=patchify, width=64), METHODS[name]
    expected = ask(pipe, method=method, output_type="latent")
    for place in ASKED:
        monkeypatch.setattr(place, lambda *given: not torch.is_grad_enabled())

    def head(cls, layer, scale, shift, eps):
        return cls(*lens.fused_head(layer.weight, layer.bias, scale, shift), eps)

    monkeypatch.setattr(lens.BitHead, "of", classmethod(head))
    worked = set()

    def counted(place: str, function):
        def call(*given, **named):
            worked.add(place)
            return function(*given, **named)

        return call

    for place in USED:
        module, function = place.rsplit(".", 1)
        monkeypatch.setattr(place, counted(place, getattr(importlib.import_module(module), function)))
    found = ask(pipe, method=method, output_type="latent")
    assert worked == {place for place, methods in USED.items() if name in methods}
    assert all(map(torch.equal, found.tokens, expected.tokens))
    assert kept(found) == kept(expected)
    assert torch.allclose(found.images, expected.images, atol=1e-5)


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("apart", [False, True], ids=["cache", "cache and tail"])
def test_attention(shares: int, apart: bool) -> None:
    torch.manual_seed(0)
    q, k, v, *tail = (torch.randn(2, 1, n, 32) for n in (20, 150, 150, 150, 150))
    length, more = torch.tensor([70, 128]), torch.tensor([64, 130])  # whole blocks of 64 keys, and parts of one
    tuned = {"SHARES": shares, "BLOCK_Q": 16, "BLOCK_K": 64, "num_warps": 4}
    seen, entropy = attention.fused(
        q, k, v, 0.2, length, more if apart else None, True, tuple(tail) if apart else None, **tuned
    )
    if apart:
        pairs = zip((k, v), tail, strict=True)
        k, v = (
            torch.stack([torch.cat((a[r, :, :n], b[r], a[r, :, n:]), 1) for r, n in enumerate(length)])
            for a, b in pairs
        )
        length = length + more
    right, spread = attention.reference(q, k, v, 0.2, length, entropy=True)
    assert torch.allclose(seen, right, atol=1e-5)
    assert torch.allclose(entropy, spread, atol=1e-5)


def test_keys_and_values_that_know_the_layers() -> None:
    torch.manual_seed(0)
    q, proj = nn.Linear(256, 256), nn.Linear(256, 256)
    k, v = torch.randn(2, 48, 2, 2, 128).permute(2, 0, 3, 1, 4)
    length = torch.tensor([20, 48])
    with torch.inference_mode():
        right, found = (f(q, proj, k, v, 0.3, length) for f in (absorbed.fold, absorbed.fused_fold))
        visible = right[1].isfinite()
        assert torch.equal(found[1].isfinite(), visible)
        for a, b in zip(right, found, strict=True):
            assert torch.allclose(a[visible], b[visible], atol=1e-5)
        scores = torch.randn(2, 9, 96)
        expected = absorbed.softmax(scores, right[1], 2, torch.float32)
        assert torch.allclose(absorbed.fused_softmax(scores, right[1], 2, torch.float32), expected, atol=1e-6)


@pytest.mark.parametrize("joined", [False, True])
def test_a_convolution_and_the_norm_behind_it(joined: bool) -> None:
    """In float32, which the interpreter multiplies rightly."""
    torch.manual_seed(0)
    last = torch.channels_last
    x = torch.randn(2, 128, 9, 19).contiguous(memory_format=last)
    other, term = torch.randn(2, 256, 9, 19).contiguous(memory_format=last), torch.randn(256)
    weight = torch.randn(256, 128, 3, 3).contiguous(memory_format=last) / 30
    layer = SimpleNamespace(weight=weight, factor=0.5)
    found, sums = conv.fused_conv(x, layer, term, 32, other if joined else None)
    expected = F.conv2d(x, weight * 0.5, term, padding=1) + (other if joined else 0)
    assert torch.allclose(found, expected, atol=1e-4)
    group_norm = nn.GroupNorm(32, 256).requires_grad_(False)
    nn.init.normal_(group_norm.weight)
    normed = norm.fused_norm(found, term, group_norm, True, False, None, Reads(torch.float32))
    assert torch.allclose(normed, F.silu(group_norm(expected + term[:, None, None])), atol=1e-4)
    normed = norm.fused_norm(found, None, group_norm, True, True, sums, Reads(torch.float32))
    assert torch.allclose(normed, F.silu(group_norm(expected)), atol=1e-4)
