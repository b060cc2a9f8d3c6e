"""Triton's kernels on the CPU, in Triton's interpreter (`make test-kernels`): whole runs with all kernels that a run in
float32 uses give the tokens of torch.

Each kernel alone, at the edges of its sizes, is in `test_interpreted_tokens.py`, `test_interpreted_attention.py` and
`test_interpreted_maps.py`. What the interpreter cannot tell, and only a GPU does (`make test-gpu`):

- products in bfloat16, which it gets wrong: kernels run in float32 here, also those that a GPU runs in 16 bits;
- the last bits of FP8: it loses a carry, and NaN (`plain.close_fp8`); so `conv` multiplies float32 here;
- `input_precision="tf32x3"`, which it takes for float32; that `enable_fp_fusion=False` keeps products and sums apart;
- that fetched tiles arrive in time (`num_stages`, descriptors), and what programs that run at once do to each other;
- that `pinned_copy` reaches the host's pinned memory from a device.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import support.fences  # noqa: F401 (skips where kernels cannot be interpreted)
import torch
from support.pipelines import ask, same_tokens

from nextscale import NOVA
from nextscale.kernels import dispatch
from nextscale.testing import tiny_infinity

LAST = 5  # scale of a run: 8 x 8 tokens

LITERAL = replace(NOVA.preset("literal"), t_est=2, alpha=10, max_layer_keep=0.3)  # looks at the layers of all scales
METHODS = {
    "none": None,
    "nova": LITERAL,
    "nova, zero": replace(LITERAL, cache="zero"),
    "nova, nearest": replace(LITERAL, restore_mode="nearest"),
    "nova, ranked once": NOVA(t_est=2, alpha=10, tau=2.0),
}
LENS = ("nova", "nova, zero", "nova, nearest")
# Kernels that must have run, by method.
USED = {
    "nextscale.kernels.bit_sampling.fused_draw": METHODS,
    "nextscale.kernels.bit_sampling.fused_combine": METHODS,
    "nextscale.kernels.linear_fp32.fused_linear": METHODS,
    "nextscale.kernels.feature_maps.fused_add": METHODS,
    "nextscale.kernels.feature_maps.fused_inputs": METHODS,
    "nextscale.kernels.bit_sampling.fused_entropy": (*LENS, "nova, ranked once"),
    "nextscale.kernels.logit_lens.fused_logit_lens": (*LENS, "nova, ranked once"),
    "nextscale.kernels.logit_lens.fused_restored_logit_lens": (*LENS, "nova, ranked once"),
    "nextscale.kernels.restore.fused_restore": ("nova", "nova, nearest", "nova, ranked once"),
    "nextscale.kernels.restore.fused_record": ("nova", "nova, nearest", "nova, ranked once"),
    "nextscale.kernels.restore.fused_scatter": ("nova, zero",),
}


def kept(out) -> list:
    return [[e["kept"] for e in s["layers"]] for i in out.trace.to_dict()["images"] for s in i["scales"]]


def run(pipe, method):
    return ask(pipe, method=method, output_type="latent", callback_on_scale_end=lambda end: end.scale.index + 1 < LAST)


@pytest.mark.parametrize(
    ("name", "patchify"),
    [("none", True), ("nova", False), ("nova, zero", True), ("nova, nearest", False), ("nova, ranked once", False)],
)
def test_kernels_give_the_tokens_of_torch(name: str, patchify: bool, monkeypatch) -> None:
    pipe, method = tiny_infinity(patchify=patchify, width=64), METHODS[name]
    expected = run(pipe, method)
    assert [bool((tokens >= 0).any()) for tokens in expected.tokens] == [True] * LAST + [False] * 2, "it ends early"
    monkeypatch.setattr(dispatch, "DEVICE", "cpu")
    monkeypatch.setattr("nextscale.runtime.eager.supports_packed", lambda backbone: True)
    worked = set()

    def counted(name: str, function):
        def call(*args, **kwargs):
            worked.add(name)
            return function(*args, **kwargs)

        return call

    for kernel in USED:
        module, function = kernel.rsplit(".", 1)
        monkeypatch.setattr(kernel, counted(kernel, getattr(importlib.import_module(module), function)))
    found = run(pipe, method)
    assert worked == {kernel for kernel, methods in USED.items() if name in methods}
    assert same_tokens(found, expected)
    assert kept(found) == kept(expected)
    assert torch.allclose(found.images, expected.images, atol=1e-5)
