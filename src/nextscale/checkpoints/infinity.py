"""Infinity's files: `infinity_*.pth`, sharded folders, and `infinity_vae_*.pth`."""

from __future__ import annotations

import dataclasses
from typing import Any

from nextscale.checkpoints.family import COMMON_RENAMES, Family, Shapes, autoencoder, count, heads_of
from nextscale.checkpoints.files import StateFile
from nextscale.errors import NextscaleError
from nextscale.models.infinity import Infinity, InfinityConfig
from nextscale.tokenizers.bsq import BSQConfig, BSQTokenizer


def _infer(shapes: Shapes, state: StateFile) -> InfinityConfig:
    text_length, text_dim = shapes["unconditional"]
    width = shapes["start_position"][2]
    return InfinityConfig(
        depth=count(shapes, r"blocks\.(\d+)\."),
        width=width,
        heads=heads_of(shapes, width),
        bits=shapes["word_embed.weight"][1],
        hidden=shapes["blocks.0.mlp.fc1.weight"][0],
        text_dim=text_dim,
        text_length=text_length,
        levels=shapes["level_embed.weight"][0],
        pool_heads=shapes["text_pool.query"][1],
    )


def _infer_tokenizer(shapes: Shapes, state: StateFile) -> BSQConfig:
    return BSQConfig(**autoencoder(shapes))  # patchify shows only beside the transformer


def _only(model: Any, name: str, value: Any) -> None:
    found = getattr(model, name, value)
    if found != value:
        raise NextscaleError(f"{type(model).__name__} has {name} = {found!r}, but only {value!r} is supported")


def _read_live(infinity: InfinityConfig, bsq: BSQConfig, model: Any, vae: Any) -> tuple[InfinityConfig, BSQConfig]:
    _only(model, "rope2d_normalized_by_hw", 2)
    _only(model, "add_lvl_embeding_only_first_block", 1)
    if bool(getattr(model, "apply_spatial_patchify", 0)) != (infinity.bits == 4 * bsq.code_dim):
        raise NextscaleError(f"the {type(vae).__name__} object is not the tokenizer of this {type(model).__name__}")
    return dataclasses.replace(infinity, eps=getattr(model, "norm_eps", infinity.eps)), bsq


FAMILY = Family(
    name="infinity",
    title="an Infinity transformer",
    module=Infinity,
    config=InfinityConfig,
    recognize=lambda keys: "text_proj_for_sos.ca.mat_q" in keys,
    rename=(
        *COMMON_RENAMES,
        (r"^cfg_uncond$", "unconditional"),
        (r"^text_norm\.weight$", "text_norm"),
        (r"^text_proj_for_sos\.ca\.mat_q$", "text_pool.query"),
        (r"^text_proj_for_sos\.ca\.", "text_pool."),
        (r"^text_proj_for_ca\.", "text_proj."),
        (r"^(blocks\.\d+)\.sa\.", r"\1.attn."),
        (r"^(blocks\.\d+)\.ca\.", r"\1.cross."),
        (r"^(blocks\.\d+)\.ca_norm\.", r"\1.cross_norm."),
        (r"\.mat_q\.", ".q."),
        (r"\.mat_kv\.", ".kv."),
    ),
    ignored=r"(^|\.)(attn_bias_for_masking|lvl_1L|zero_k_bias|Infinity_(in)?visible_(kv|q)len)$",
    infer=_infer,
    tokenizer="bsq",
    read_live=_read_live,
)
TOKENIZER = Family(
    name="bsq",
    title="a BSQ tokenizer (Infinity)",
    module=BSQTokenizer,
    config=BSQConfig,
    recognize=lambda keys: (
        any(k.startswith("encoder.conv_in.") for k in keys)
        and any(k.startswith("decoder.up.") for k in keys)
        and not any(k.startswith(("quantize.embedding.", "quant_conv.")) for k in keys)
    ),
    rename=(
        # Every conv and norm is wrapped once; files without the inner names exist too.
        (r"\.(conv|norm)\.(weight|bias)$", r".\2"),
        (r"\.(down|up)sample(\.conv)?\.(weight|bias)$", r".\1sample.conv.\3"),
    ),
    ignored=r"\.lfq\.mask$",
    infer=_infer_tokenizer,
)
