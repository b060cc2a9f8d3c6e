"""HART's files: a folder `llm` (with averaged weights, `ema_model.bin`) and a folder `tokenizer`."""

from __future__ import annotations

from typing import Any

from nextscale.checkpoints.family import COMMON_RENAMES, Family, Shapes, autoencoder, count
from nextscale.checkpoints.files import StateFile
from nextscale.checkpoints.paths import present
from nextscale.checkpoints.var import TOKENIZER as VAR_TOKENIZER
from nextscale.errors import NextscaleError
from nextscale.io.reading import read_json
from nextscale.models.hart import HART, HARTConfig
from nextscale.models.registry import VAR_SIDES
from nextscale.tokenizers.vq import VQConfig, VQTokenizer


def _settings(state: StateFile) -> dict[str, Any]:
    """The config.json beside the weights, with what no shape shows."""
    if not present(state.path):  # a live object
        return {}
    folder = state.path if state.path.is_dir() else state.path.parent
    path = folder / "config.json"
    content = read_json(path, "readable JSON") if path.is_file() else None
    return content if isinstance(content, dict) else {}


def _infer(shapes: Shapes, state: StateFile) -> HARTConfig:
    settings = _settings(state)
    width = shapes["context_embed.weight"][0]
    scale = shapes.get("blocks.0.attn.log_scale")
    text_length, sides = 300, VAR_SIDES[1024]
    if "lvl_1L" in state.infos and state.infos["lvl_1L"].shape[-1] != text_length - 1 + sum(s * s for s in sides):
        levels = state.tensors(["lvl_1L"])["lvl_1L"].flatten()
        counts = [int((levels == k).sum()) for k in range(int(levels.max()) + 1)]
        text_length, sides = counts[0], (1, *(round(n**0.5) for n in counts[1:]))
    config = HARTConfig(
        depth=count(shapes, r"blocks\.(\d+)\."),
        width=width,
        heads=max(scale) if scale else int(settings.get("num_heads", width // 64)),
        hidden=shapes["blocks.0.mlp.up.weight"][0],
        sides=tuple(settings.get("patch_nums", sides)),
        text_dim=shapes["context_embed.weight"][1],
        text_length=int(settings.get("context_token", text_length)),
        vocabulary=shapes["head_linear.weight"][0],
        code_dim=shapes["word_embed.weight"][1],
        cosine_attention=scale is not None,
        text_normalized="context_norm.weight" in shapes,
        sinusoid_levels="level_embed.mlp.0.weight" in shapes,
        diffusion_width=shapes["residual.enter.weight"][0],
        diffusion_depth=count(shapes, r"residual\.blocks\.(\d+)\."),
        diffusion_steps=int(settings.get("num_sampling_steps", 8)),
        eps=float(settings.get("norm_eps", 1e-6)),
    )
    known = {
        "depth": config.depth,
        "embed_dim": config.width,
        "context_dim": config.text_dim,
        "diff_width": config.diffusion_width,
        "diff_depth": config.diffusion_depth,
        "attn_l2_norm": config.cosine_attention,
        "use_timestep_embed": config.sinusoid_levels,
    }
    for name, value in known.items():
        if name in settings and settings[name] != value:
            raise NextscaleError(
                f"config.json beside {state.path} has {name} = {settings[name]!r}, but its weights have {value!r}"
            )
    return config


def _infer_tokenizer(shapes: Shapes, state: StateFile) -> VQConfig:
    phis = count(shapes, r"phi\.(\d+)\.")
    return VQConfig(vocabulary=shapes["codebook.weight"][0], phis=phis, hybrid=True, **autoencoder(shapes))


FAMILY = Family(
    name="hart",
    title="a HART transformer",
    module=HART,
    config=HARTConfig,
    recognize=lambda keys: "diffloss.net.input_proj.weight" in keys,
    rename=(
        (r"^decoder_norm\.", "residual_norm."),
        (r"^diffloss\.net\.", "residual."),
        (r"^(residual)\.cond_embed\.", r"\1.condition."),
        (r"^(residual)\.input_proj\.", r"\1.enter."),
        (r"^(residual)\.res_blocks\.(\d+)\.in_ln\.", r"\1.blocks.\2.norm."),
        (r"^(residual)\.res_blocks\.", r"\1.blocks."),
        (r"^(residual)\.final_layer\.linear\.", r"\1.leave."),
        (r"^(residual)\.final_layer\.adaLN_modulation\.1\.", r"\1.final_modulation."),
        (r"\.adaLN_modulation\.1\.", ".modulation."),
        (r"^head_nm\.ln_wo_grad\.", "head_norm."),
        (r"^head_nm\.ada_lin\.1\.", "head_modulation."),
        (r"\.ln_wo_grad\.", ".norm."),
        (r"\.qkv_proj\.", ".qkv."),
        *COMMON_RENAMES,
        (r"\.mlp\.(gate|up|down)_proj\.", r".mlp.\1."),
    ),
    ignored=r"(^|\.)(attn_bias_for_masking|lvl_1L|zero_k_bias)$",  # the first alone is 380 MB
    infer=_infer,
    tokenizer="hybrid-vq",
)
TOKENIZER = Family(
    name="hybrid-vq",
    title="a hybrid VQ tokenizer (HART)",
    module=VQTokenizer,
    config=VQConfig,
    recognize=lambda keys: "vae.quantize.embedding.weight" in keys,
    rename=((r"^vae\.", ""), *VAR_TOKENIZER.rename),
    ignored=r"^disc\.|\.ema_vocab_hit_SV$|^vae\.(decoder2|post_quant_conv2)\.",
    infer=_infer_tokenizer,
)
