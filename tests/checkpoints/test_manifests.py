"""Every key of the published checkpoints has its place, and every parameter of ours its key."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from support.pipelines import DATA

from nextscale.checkpoints.families import FAMILIES, family_of, infer_config, rename
from nextscale.checkpoints.load import check
from nextscale.models.registry import INFINITY_SIZES, MODELS, infinity_config, published
from nextscale.official import LiveState

MANIFESTS = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))


def state_of(name: str) -> LiveState:
    with torch.device("meta"):
        return LiveState(name, {key: torch.empty(shape) for key, (shape, _) in MANIFESTS[name].items()})


@pytest.mark.parametrize("name", MANIFESTS)
def test_one_to_one(name: str) -> None:
    state = state_of(name)
    if name.startswith("var_"):  # the schedule of an unknown size would be read off lvl_1L, which has no data here
        del state.infos["lvl_1L"]
    family = family_of(state.infos)
    kinds = {"vae": "vq", "infinity_vae": "bsq", "hart_tokenizer": "hybrid-vq"}
    tokenizer = next((kind for start, kind in kinds.items() if name.startswith(start)), None)
    assert family.name == (tokenizer or name.split("_")[0])
    names = rename(family, state.infos)
    config = infer_config(family, state, names)
    with torch.device("meta"):
        module = family.module(config)
    check(module, state, names)
    assert sorted(names.values()) == sorted(n for n, _ in module.named_parameters())
    left_out = {key.rpartition(".")[2] for key in state.infos if key not in names and not key.startswith("disc.")}
    assert left_out <= {"attn_bias_for_masking", "zero_k_bias", "ema_vocab_hit_SV", "mask", "lvl_1L"}


def test_shapes_tell_the_published_models() -> None:
    for spec in published():
        name = spec.weights.split(".")[0]
        name = {"infinity_2b_reg": "infinity_2b", "infinity_125M_256x256": "infinity_layer12"}.get(name, name)
        name = "infinity_8b" if name.startswith("infinity_8b") else "hart_0_7b" if name == "llm/" else name
        state = state_of(name)
        family = FAMILIES[spec.family]
        config = infer_config(family, state, rename(family, state.infos))
        assert config == spec.backbone, spec.name


@pytest.mark.parametrize("name", INFINITY_SIZES)
def test_infinity_sizes(name: str) -> None:
    state = state_of(name)
    family = FAMILIES["infinity"]
    config = infer_config(family, state, rename(family, state.infos))
    assert config == infinity_config(*INFINITY_SIZES[name], config.bits)


def test_parameter_counts() -> None:
    """The totals of the model cards, in millions."""
    totals = {"var-d16": 310.28, "var-d30": 2010.02, "var-d36": 2353.89, "infinity-2b": 2204.6, "hart-0.7b": 732.40}
    for name, millions in totals.items():
        spec = MODELS[name]
        with torch.device("meta"):
            module = FAMILIES[spec.family].module(spec.backbone)
        assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
