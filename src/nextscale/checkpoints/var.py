"""VAR's files: `var_d*.pth` and `vae_ch160v4096z32.pth`."""

from __future__ import annotations

import dataclasses
from typing import Any

from nextscale.checkpoints.family import COMMON_RENAMES, Family, Shapes, autoencoder, count, heads_of
from nextscale.checkpoints.files import StateFile
from nextscale.errors import NextscaleError
from nextscale.models.registry import VAR_SIDES
from nextscale.models.var import VAR, VARConfig
from nextscale.tokenizers.vq import VQConfig, VQTokenizer


def _infer(shapes: Shapes, state: StateFile) -> VARConfig:
    width = shapes["start_position"][2]
    tokens, scales = shapes["position"][1], shapes["level_embed.weight"][0]
    sides = next((s for s in VAR_SIDES.values() if sum(n * n for n in s) == tokens and len(s) == scales), None)
    if sides is None and "lvl_1L" in state.infos:  # an unknown schedule can be read off this buffer
        levels = state.tensors(["lvl_1L"])["lvl_1L"].flatten()
        sides = tuple(round(int((levels == k).sum()) ** 0.5) for k in range(scales))
    if sides is None:
        raise NextscaleError(f"{state.path} has {tokens} positions in {scales} scales, which is no known schedule")
    return VARConfig(
        depth=count(shapes, r"blocks\.(\d+)\."),
        width=width,
        heads=heads_of(shapes, width),
        hidden=shapes["blocks.0.mlp.fc1.weight"][0],
        sides=sides,
        classes=shapes["class_embed.weight"][0] - 1,
        vocabulary=shapes["head_linear.weight"][0],
        code_dim=shapes["word_embed.weight"][1],
        shared_modulation="shared_modulation.1.weight" in shapes,
        cosine_attention="blocks.0.attn.log_scale" in shapes,
    )


def _infer_tokenizer(shapes: Shapes, state: StateFile) -> VQConfig:
    phis = count(shapes, r"phi\.(\d+)\.")
    return VQConfig(vocabulary=shapes["codebook.weight"][0], phis=phis, **autoencoder(shapes))


def _read_live(var: VARConfig, vq: VQConfig, model: Any, vae: Any) -> tuple[VARConfig, VQConfig]:
    """Heads without cosine attention, epsilon, the share of phi."""
    block = next(iter(getattr(model, "blocks", ())), None)
    quantizer = getattr(vae, "quantize", None)
    var = dataclasses.replace(
        var,
        heads=getattr(model, "num_heads", var.heads),
        sides=tuple(getattr(model, "patch_nums", var.sides)),
        eps=getattr(getattr(block, "ln_wo_grad", None), "eps", var.eps),
    )
    vq = dataclasses.replace(
        vq,
        phi_ratio=abs(getattr(quantizer, "quant_resi_ratio", vq.phi_ratio)),
        normalized=bool(getattr(quantizer, "using_znorm", False)),
    )
    return var, vq


FAMILY = Family(
    name="var",
    title="a VAR transformer",
    module=VAR,
    config=VARConfig,
    recognize=lambda keys: "class_emb.weight" in keys and "text_norm.weight" not in keys,
    rename=(*COMMON_RENAMES, (r"^pos_1LC$", "position"), (r"^class_emb\.", "class_embed.")),
    ignored=r"(^|\.)(attn_bias_for_masking|lvl_1L|zero_k_bias)$",
    infer=_infer,
    tokenizer="vq",
    read_live=_read_live,
)
TOKENIZER = Family(
    name="vq",
    title="a VQ tokenizer (VAR)",
    module=VQTokenizer,
    config=VQConfig,
    recognize=lambda keys: "quantize.embedding.weight" in keys,
    rename=(
        (r"^quantize\.embedding\.", "codebook."),
        (r"^quantize\.quant_resi\.(?:qresi_ls\.)?(\d+)\.", r"phi.\1."),
        (r"^quantize\.quant_resi\.qresi\.", "phi.0."),
    ),
    ignored=r"\.ema_vocab_hit_SV$",
    infer=_infer_tokenizer,
)
