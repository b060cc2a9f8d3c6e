"""Triton's kernels on the CPU, in Triton's interpreter (`make test-kernels`): whole runs with all kernels that a run in
float32 uses give the tokens of torch.

Each kernel alone, at the edges of its sizes, is in `test_interpreted_tokens.py`, `test_interpreted_attention.py` and
`test_interpreted_maps.py`. What the interpreter cannot tell, and only a GPU does (`make test-gpu`):

- products in bfloat16, which it gets wrong: kernels run in float32 here, also those that a GPU runs in 16 bits;
- the last bits of 8: it loses a carry, and NaN (`plain.eight_bits`); so `conv_triton` multiplies float32 here;
- `input_precision="tf32x3"`, which it takes for float32; that `enable_fp_fusion=False` keeps products and sums apart;
- that fetched tiles arrive in time (`num_stages`, descriptors), and what programs that run at once do to each other;
- that `host_triton` reaches the host's pinned memory from a device.
"""

from __future__ import annotations

import importlib

import pytest
import support.fences  # noqa: F401 (skips where kernels cannot be interpreted)
import torch
from support.pipelines import ask, same_tokens

from nextscale import NOVA
from nextscale.kernels import logit_lens
from nextscale.testing import tiny_infinity

LAST = 5  # scale of a run: 8 x 8 tokens

METHODS = {
    "none": None,
    "nova": NOVA(t_est=2, alpha=10, max_layer_keep=0.3),
    "nova, zero": NOVA(t_est=2, alpha=10, max_layer_keep=0.3, cache="zero"),
    "nova, nearest": NOVA(t_est=2, alpha=10, max_layer_keep=0.3, restore_mode="nearest"),
}
# Where somebody asks whether a kernel takes a tensor: each of them would say no on a CPU.
ASKED = (
    "nextscale.methods.base.puts",
    "nextscale.methods.restore.puts",
    "nextscale.methods.selection.selects",
    "nextscale.methods.nova.layer_linkage.selects",
    "nextscale.runtime.eager.looks",
    "nextscale.runtime.eager.supports_packed",
    "nextscale.kernels.residual_norm.fuses",
    "nextscale.models.residual.fuses",
    "nextscale.kernels.linear_fp32.takes",
    "nextscale.engine.guidance.takes",
    "nextscale.engine.sampling.takes",
    "nextscale.engine.entropy.takes",
    "nextscale.tokenizers.bsq.takes",
)


# Who must have been at work then, by method.
USED = {
    "nextscale.engine.sampling.fused_draw": METHODS,
    "nextscale.engine.guidance.fused_combine": METHODS,
    "nextscale.kernels.linear_fp32.fused_linear": METHODS,
    "nextscale.tokenizers.bsq.fused_add": METHODS,
    "nextscale.tokenizers.bsq.fused_inputs": METHODS,
    "nextscale.engine.entropy.fused_entropy": ("nova", "nova, zero", "nova, nearest"),
    "nextscale.kernels.logit_lens.fused_lens": ("nova", "nova, zero", "nova, nearest"),
    "nextscale.kernels.logit_lens.fused_lens_of_filled": ("nova", "nova, zero", "nova, nearest"),
    "nextscale.methods.restore.fused_restore": ("nova", "nova, nearest"),
    "nextscale.methods.restore.fused_record": ("nova", "nova, nearest"),
    "nextscale.methods.base.fused_put": ("nova, zero",),
}


def kept(out) -> list:
    return [[e["kept"] for e in s["layers"]] for i in out.trace.to_dict()["images"] for s in i["scales"]]


def run(pipe, method):
    return ask(pipe, method=method, output_type="latent", callback_on_scale_end=lambda end: end.scale.index + 1 < LAST)


@pytest.mark.parametrize(
    ("name", "patchify"), [("none", True), ("nova", False), ("nova, zero", True), ("nova, nearest", False)]
)
def test_kernels_give_the_tokens_of_torch(name: str, patchify: bool, monkeypatch) -> None:
    pipe, method = tiny_infinity(patchify=patchify, width=64), METHODS[name]
    expected = run(pipe, method)
    assert [bool((tokens >= 0).all()) for tokens in expected.tokens] == [True] * LAST + [False] * 2, "it ends early"
    for place in ASKED:
        monkeypatch.setattr(place, lambda *given: not torch.is_grad_enabled())

    def head(cls, layer, scale, shift, eps):
        return cls(*logit_lens.fused_head(layer.weight, layer.bias, scale, shift), eps)

    monkeypatch.setattr(logit_lens.BitHead, "of", classmethod(head))
    worked = set()

    def counted(place: str, function):
        def call(*given, **named):
            worked.add(place)
            return function(*given, **named)

        return call

    for place in USED:
        module, function = place.rsplit(".", 1)
        monkeypatch.setattr(place, counted(place, getattr(importlib.import_module(module), function)))
    found = run(pipe, method)
    assert worked == {place for place, methods in USED.items() if name in methods}
    assert same_tokens(found, expected)
    assert kept(found) == kept(expected)
    assert torch.allclose(found.images, expected.images, atol=1e-5)
