"""Pipelines over live objects: stand-ins with the keys and attributes of the official classes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support import files
from support.files import CASE_2B, CASE_8B, VAR_CASE, recorded_tokens
from torch import nn

import nextscale
from nextscale.errors import NextscaleError


class Holder(nn.Module):
    """A module whose state dict is given."""

    def __init__(self, state, **attributes) -> None:
        super().__init__()
        self.state = state
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def state_dict(self, *args, **kwargs):
        return self.state


def official_var(**changes):
    quantize = SimpleNamespace(quant_resi_ratio=0.5, using_znorm=False)
    vae = Holder(files.vae(VAR_CASE), quantize=quantize)
    config = json.loads((VAR_CASE / "config.json").read_text())["transformer"]
    attributes = {
        "num_heads": config["num_heads"],
        "patch_nums": tuple(config["patch_nums"]),
        "blocks": [SimpleNamespace(ln_wo_grad=SimpleNamespace(eps=1e-6))],
        "vae_proxy": (vae,),
    }
    return Holder(files.state(VAR_CASE), **(attributes | changes)), vae


def official_infinity(case=CASE_2B, state=None, **changes):
    attributes = {
        "pn": "0.06M",
        "norm_eps": 1e-6,
        "rope2d_normalized_by_hw": 2,
        "add_lvl_embeding_only_first_block": 1,
        "apply_spatial_patchify": int(case == CASE_8B),
    }
    return Holder(state or files.state(case), **(attributes | changes)), Holder(files.vae(case))


def test_var() -> None:
    model, vae = official_var()
    pipe = nextscale.from_official(model)
    assert recorded_tokens(VAR_CASE, pipe)
    ours = {p.data_ptr() for m in (pipe.backbone, pipe.tokenizer) for p in m.parameters()}
    assert ours <= {t.data_ptr() for t in (*model.state.values(), *vae.state.values())}
    model.state["head.bias"].zero_()
    assert not pipe.backbone.head_linear.bias.any(), "weights are shared"


@pytest.mark.parametrize("case", [CASE_2B, CASE_8B], ids=lambda c: c.name)
def test_infinity(case) -> None:
    pipe = nextscale.from_official(*official_infinity(case))
    assert recorded_tokens(case, pipe)
    assert pipe.spec.pixel_budget == "0.06M"


def test_the_pixel_budget_of_a_live_object() -> None:
    """Another than the one that its shapes suggest."""
    told = nextscale.from_official(*official_infinity(pn="0.25M")).spec.pixel_budget
    silent = nextscale.from_official(*official_infinity(pn="a million")).spec.pixel_budget
    assert told == "0.25M"
    assert silent is not None
    assert silent != told


def test_a_state_dict_may_be_all_there_is() -> None:
    model, vae = Holder(files.state(VAR_CASE)), Holder(files.vae(VAR_CASE))
    assert recorded_tokens(VAR_CASE, nextscale.from_official(model, vae))


def test_attributes_say_what_shapes_do_not() -> None:
    model, vae = official_var(blocks=[SimpleNamespace(ln_wo_grad=SimpleNamespace(eps=1e-5))], num_heads=4)
    vae.quantize.quant_resi_ratio, vae.quantize.using_znorm = -0.25, True
    pipe = nextscale.from_official(model)
    assert pipe.backbone.config.eps == 1e-5
    assert pipe.tokenizer.config.phi_ratio == 0.25
    assert pipe.tokenizer.config.normalized


def test_compiled_modules_and_half_precision_blocks() -> None:
    state = {f"_orig_mod.{k}": v.bfloat16() if "block_chunks" in k else v for k, v in files.state(CASE_2B).items()}
    model, vae = official_infinity(state=state)
    pipe = nextscale.from_official(model, vae)
    assert pipe.dtype == torch.bfloat16
    io = load_file(CASE_2B / "io.safetensors")
    assert pipe(prompt_embeds=[io["sampled.text_features"]], seed=0, output_type="pt").images.isfinite().all()
    shared = {t.data_ptr() for t in state.values()}
    assert pipe.backbone.blocks[0].attn.qkv.weight.data_ptr() in shared


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: official_infinity(rope2d_normalized_by_hw=1), "rope2d_normalized_by_hw = 1"),
        (lambda: (official_infinity()[0], None), "pass the tokenizer object too"),
        (lambda: (official_infinity()[0], official_var()[1]), "holds a VQ tokenizer"),
        (lambda: (official_infinity(CASE_2B)[0], official_infinity(CASE_8B)[1]), "(not the tokenizer|does not fit)"),
        (lambda: (object(), official_var()[1]), "it has no state_dict"),
        (lambda: (nn.Linear(2, 2), official_var()[1]), "no known model"),
    ],
)
def test_objects_we_cannot_use(make, match: str) -> None:
    with pytest.raises(NextscaleError, match=match):
        nextscale.from_official(*make())
