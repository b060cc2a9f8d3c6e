"""The published models, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from nextscale.engine.schedule import Grid
from nextscale.errors import NextscaleError
from nextscale.io.arguments import read_choice
from nextscale.io.config import is_number, is_whole
from nextscale.models.hart import HARTConfig
from nextscale.models.infinity import InfinityConfig
from nextscale.models.var import VARConfig
from nextscale.tokenizers.bsq import BSQConfig
from nextscale.tokenizers.vq import VQConfig

VAR_SIDES = {
    256: (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    512: (1, 2, 3, 4, 6, 9, 13, 18, 24, 32),
    1024: (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64),
}


@dataclass(frozen=True)
class Defaults:
    """Sampling values that the authors publish; `guidance_scale` in the family's own convention."""

    guidance_scale: float
    temperature: float = 1.0
    top_k: int | tuple[int, ...] = 900  # of every scale, the last holding for all that follow
    top_p: float = 0.95
    smooth: bool = False

    def __post_init__(self) -> None:
        ks = self.top_k if isinstance(self.top_k, tuple) else (self.top_k,)
        wrong = {
            "guidance_scale": not is_number(self.guidance_scale, -math.inf),
            "temperature": not is_number(self.temperature) or self.temperature == 0,
            "top_k": not ks or not all(is_whole(k, 0) for k in ks),
            "top_p": not is_number(self.top_p, 0, 1),
            "smooth": not isinstance(self.smooth, bool),
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise NextscaleError(f"{name} = {getattr(self, name)!r} cannot be a default")


@dataclass(frozen=True)
class ModelSpec:
    name: str
    family: str
    backbone: Any  # VARConfig | InfinityConfig
    tokenizer: Any  # VQConfig | BSQConfig
    defaults: Defaults
    repo: str  # on the hub; empty = inside the package, or not published
    weights: str  # file, or folder ending in "/"
    tokenizer_files: tuple[str, ...]  # the first is the published name, the others are spelled so elsewhere
    pixel_budget: str | None = None
    text_encoder: str | None = None
    sizes: tuple[Grid, ...] = ()  # height x width in pixels that it was trained for; empty = all of its schedule
    notes: str = field(default="", compare=False)


def _var(depth: int, size: int) -> ModelSpec:
    shared = depth == 36
    config = VARConfig(depth, 64 * depth, depth, 256 * depth, VAR_SIDES[size], shared_modulation=shared)
    return ModelSpec(
        name=f"var-d{depth}",
        family="var",
        backbone=config,
        tokenizer=VQConfig(),
        defaults=Defaults(guidance_scale=4.0),
        repo="FoundationVision/var",
        weights=f"var_d{depth}.pth",
        tokenizer_files=("vae_ch160v4096z32.pth",),
        notes=f"ImageNet classes, {size} x {size}",
    )


def infinity_config(depth: int, width: int, heads: int, bits: int) -> InfinityConfig:
    hidden = round(4 * width / 256) * 256  # Python rounds half to even, as the original did
    return InfinityConfig(depth, width, heads, bits, hidden)


# Every size that the official code names: depth, width, heads.
INFINITY_SIZES = {
    "infinity_layer12": (12, 768, 8),
    "infinity_layer16": (16, 1152, 12),
    "infinity_layer24": (24, 1536, 16),
    "infinity_2b": (32, 2048, 16),
    "infinity_layer32": (32, 2080, 20),
    "infinity_layer40": (40, 2688, 24),
    "infinity_8b": (40, 3584, 28),
    "infinity_layer48": (48, 3360, 28),
}
# Every tokenizer of that repository: some can be told apart by nothing but the names of their files.
PUBLISHED_TOKENIZERS = (
    "infinity_vae_d16.pth",
    "infinity_vae_d24.pth",
    "infinity_vae_d32.pth",
    "infinity_vae_d32reg.pth",
    "infinity_vae_d32_reg.pth",
    "infinity_vae_d64.pth",
    "infinity_vae_d56_f8_14_patchify.pth",
)
_PATCHIFY = BSQConfig(14, multipliers=(1, 2, 4, 4), patchify=True)


def _infinity(
    name: str,
    size: str,
    tokenizer: BSQConfig,
    files: tuple[str, ...],
    budget: str,
    defaults: Defaults,
    notes: str,
) -> ModelSpec:
    bits = tokenizer.code_dim * (4 if tokenizer.patchify else 1)
    return ModelSpec(
        name=name,
        family="infinity",
        backbone=infinity_config(*INFINITY_SIZES[size], bits),
        tokenizer=tokenizer,
        defaults=defaults,
        repo="FoundationVision/Infinity",
        weights=files[0],
        tokenizer_files=files[1:],
        pixel_budget=budget,
        text_encoder="google/flan-t5-xl",
        notes=notes,
    )


_HART = ModelSpec(
    name="hart-0.7b",
    family="hart",
    backbone=HARTConfig(24, 1536, 24, 4096, VAR_SIDES[1024]),
    tokenizer=VQConfig(hybrid=True),
    defaults=Defaults(4.5, top_k=(600,) * 7 + (300,), top_p=0.0, smooth=True),
    repo="mit-han-lab/hart-0.7b-1024px",
    weights="llm/",
    tokenizer_files=("tokenizer/",),
    text_encoder="mit-han-lab/Qwen2-VL-1.5B-Instruct",
    notes="text, 1024 x 1024",
)

_SPECS = (
    *(_var(depth, 256) for depth in (16, 20, 24, 30)),
    _var(36, 512),
    _infinity(
        "infinity-125m",
        "infinity_layer12",
        BSQConfig(16),
        ("infinity_125M_256x256.pth", "infinity_vae_d16.pth"),
        "0.06M",
        Defaults(4.0, temperature=0.5, top_p=0.97),
        "text, 256 x 256 (pairing and sampling values are not published)",
    ),
    _infinity(
        "infinity-2b",
        "infinity_2b",
        BSQConfig(32),
        ("infinity_2b_reg.pth", "infinity_vae_d32reg.pth", "infinity_vae_d32_reg.pth"),
        "1M",
        Defaults(4.0, temperature=0.5, top_p=0.97),
        "text, 1024 x 1024",
    ),
    _infinity(
        "infinity-8b",
        "infinity_8b",
        _PATCHIFY,
        ("infinity_8b_weights/", "infinity_vae_d56_f8_14_patchify.pth"),
        "1M",
        Defaults(3.0, temperature=1.0, top_p=0.97),
        "text, 1024 x 1024",
    ),
    _infinity(
        "infinity-8b-512",
        "infinity_8b",
        _PATCHIFY,
        ("infinity_8b_512x512_weights/", "infinity_vae_d56_f8_14_patchify.pth"),
        "0.25M",
        Defaults(3.0, temperature=1.0, top_p=0.97),
        "text, 512 x 512",
    ),
    _HART,
)
# The one that comes with the package (MODEL_CARD.md).
EMBEDDED = ModelSpec(
    name="clipart",
    family="infinity",
    backbone=InfinityConfig(12, 320, 5, 16, 1280, text_dim=256, text_length=48, levels=13, pool_heads=5),
    tokenizer=BSQConfig(16, channels=64, multipliers=(1, 2, 3), residual_blocks=1, fold=2),
    defaults=Defaults(4.0, temperature=0.7, top_k=0, top_p=0.97),
    repo="",
    weights="",
    tokenizer_files=(),
    pixel_budget="1M",
    sizes=((512, 512),),
    notes="clip-art scenes, 512 x 512, comes with the package",
)
MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in (EMBEDDED, *_SPECS)}


def published() -> list[ModelSpec]:
    """The models that have files of their own; users may add some to MODELS."""
    return [spec for spec in MODELS.values() if spec.weights]


def get_model(name: str) -> ModelSpec:
    return MODELS[read_choice(name, "model", MODELS)]
