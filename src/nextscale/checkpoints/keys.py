"""Official state-dict keys -> ours, one table per family."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nextscale.errors import NextscaleError

Rules = tuple[tuple[str, str], ...]

_BLOCK: Rules = (
    (r"\.ada_gss$", ".offset"),
    (r"\.ada_lin\.", ".modulation."),
    (r"\.scale_mul_1H11$", ".log_scale"),
    (r"\.mat_qkv\.", ".qkv."),
    (r"\.ffn\.", ".mlp."),
)
_COMMON: Rules = (
    (r"^pos_start$", "start_position"),
    (r"^lvl_embed\.", "level_embed."),
    (r"^shared_ada_lin\.", "shared_modulation."),
    (r"^head_nm\.ada_lin\.", "head_modulation."),
    (r"^head\.", "head_linear."),
)

RENAME: dict[str, Rules] = {
    "var": (
        *_COMMON,
        (r"^pos_1LC$", "position"),
        (r"^class_emb\.", "class_embed."),
        *_BLOCK,
    ),
    "infinity": (
        *_COMMON,
        (r"^cfg_uncond$", "unconditional"),
        (r"^text_norm\.weight$", "text_norm"),
        (r"^text_proj_for_sos\.ca\.mat_q$", "text_pool.query"),
        (r"^text_proj_for_sos\.ca\.", "text_pool."),
        (r"^text_proj_for_ca\.", "text_proj."),
        *_BLOCK,
        (r"^(blocks\.\d+)\.sa\.", r"\1.attn."),
        (r"^(blocks\.\d+)\.ca\.", r"\1.cross."),
        (r"^(blocks\.\d+)\.ca_norm\.", r"\1.cross_norm."),
        (r"\.mat_q\.", ".q."),
        (r"\.mat_kv\.", ".kv."),
    ),
    "vq": (
        (r"^quantize\.embedding\.", "codebook."),
        (r"^quantize\.quant_resi\.(?:qresi_ls\.)?(\d+)\.", r"phi.\1."),
        (r"^quantize\.quant_resi\.qresi\.", "phi.0."),
    ),
    "bsq": (
        # Every conv and norm is wrapped once; files without the inner names exist too.
        (r"\.(conv|norm)\.(weight|bias)$", r".\2"),
        (r"\.(down|up)sample(\.conv)?\.(weight|bias)$", r".\1sample.conv.\3"),
    ),
}

# Buffers that can be derived, or that only training reads.
IGNORED: dict[str, str] = {
    "var": r"(^|\.)(attn_bias_for_masking|lvl_1L|zero_k_bias)$",
    "infinity": r"(^|\.)(attn_bias_for_masking|lvl_1L|zero_k_bias|Infinity_(in)?visible_(kv|q)len)$",
    "vq": r"\.ema_vocab_hit_SV$",
    "bsq": r"\.lfq\.mask$",
}

_MARKS = {  # keys that only this family has
    "infinity": "text_proj_for_sos.ca.mat_q",
    "var": "class_emb.weight",
    "hart": "context_embed.weight",
    "vq": "quantize.embedding.weight",
}
FAMILY_NAMES = {
    "var": "a VAR transformer",
    "infinity": "an Infinity transformer",
    "hart": "a HART transformer",
    "vq": "a VQ tokenizer (VAR)",
    "bsq": "a BSQ tokenizer (Infinity)",
}


def family_of(keys: Iterable[str]) -> str | None:
    """Whose state dict this is."""
    keys = set(keys)
    for family, mark in _MARKS.items():
        if mark in keys:
            return family
    if any(k.startswith("encoder.conv_in.") for k in keys) and any(k.startswith("decoder.up.") for k in keys):
        return "bsq"
    return None


def rename(family: str, keys: Iterable[str]) -> dict[str, str]:
    """Official key -> our parameter name, without the ignored buffers."""
    keys = [k for k in keys if not re.search(IGNORED[family], k)]
    names = {key: key for key in keys}
    if family == "infinity":
        names = {key: _unchunk(key, _chunk_length(keys)) for key in keys}
    for pattern, replacement in RENAME[family]:
        names = {key: re.sub(pattern, replacement, name) for key, name in names.items()}
    if len(set(names.values())) != len(names):
        raise NextscaleError("the checkpoint names a tensor twice, with and without its inner name")
    return names


def _chunk_length(keys: Iterable[str]) -> int:
    places = [re.match(r"block_chunks\.\d+\.module\.(\d+)\.", key) for key in keys]
    return max((int(m.group(1)) + 1 for m in places if m), default=0)


def _unchunk(key: str, length: int) -> str:
    """Official blocks live in chunks, which only shaped the sharding of training."""
    m = re.match(r"block_chunks\.(\d+)\.module\.(\d+)\.(.*)", key)
    return f"blocks.{int(m.group(1)) * length + int(m.group(2))}.{m.group(3)}" if m else key
