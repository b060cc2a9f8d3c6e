"""Model configuration from the shapes in a checkpoint, so that fine-tuned and unknown sizes load too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nextscale.checkpoints.files import StateFile
from nextscale.errors import NextscaleError
from nextscale.models.infinity import InfinityConfig
from nextscale.models.registry import VAR_SIDES
from nextscale.models.var import VARConfig
from nextscale.tokenizers.bsq import BSQConfig
from nextscale.tokenizers.vq import VQConfig

Shapes = Mapping[str, tuple[int, ...]]


def count(names: Iterable[str], pattern: str) -> int:
    """How many different numbers stand at the place of the pattern's group: the length of a module list."""
    found = (re.match(pattern, name) for name in names)
    return len({m.group(1) for m in found if m})


def infer_config(family: str, state: StateFile, names: Mapping[str, str]) -> Any:
    """`names` maps the file's keys to ours; so does the result's meaning of the shapes."""
    shapes = {ours: state.infos[theirs].shape for theirs, ours in names.items()}
    try:
        if family == "var":
            return _var(shapes, state)
        return {"infinity": _infinity, "vq": _vq, "bsq": _bsq}[family](shapes)
    except KeyError as error:
        raise NextscaleError(f"{state.path} lacks the tensor {error.args[0]!r}") from None


def _heads(shapes: Shapes, width: int) -> int:
    scale = shapes.get("blocks.0.attn.log_scale")
    return max(scale) if scale else width // 64  # plain attention stores no trace of its heads


def _var(shapes: Shapes, state: StateFile) -> VARConfig:
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
        heads=_heads(shapes, width),
        hidden=shapes["blocks.0.mlp.fc1.weight"][0],
        sides=sides,
        classes=shapes["class_embed.weight"][0] - 1,
        vocabulary=shapes["head_linear.weight"][0],
        code_dim=shapes["word_embed.weight"][1],
        shared_modulation="shared_modulation.1.weight" in shapes,
        cosine_attention="blocks.0.attn.log_scale" in shapes,
    )


def _infinity(shapes: Shapes) -> InfinityConfig:
    text_length, text_dim = shapes["unconditional"]
    width = shapes["start_position"][2]
    return InfinityConfig(
        depth=count(shapes, r"blocks\.(\d+)\."),
        width=width,
        heads=_heads(shapes, width),
        bits=shapes["word_embed.weight"][1],
        hidden=shapes["blocks.0.mlp.fc1.weight"][0],
        text_dim=text_dim,
        text_length=text_length,
        levels=shapes["level_embed.weight"][0],
        pool_heads=shapes["text_pool.query"][1],
    )


def _autoencoder(shapes: Shapes) -> dict[str, Any]:
    channels = shapes["encoder.conv_in.weight"][0]
    levels = count(shapes, r"encoder\.down\.(\d+)\.")
    widths = [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(levels)]
    return {
        "code_dim": shapes["decoder.conv_in.weight"][1],
        "channels": channels,
        "multipliers": tuple(w // channels for w in widths),
        "residual_blocks": count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
    }


def _vq(shapes: Shapes) -> VQConfig:
    return VQConfig(
        vocabulary=shapes["codebook.weight"][0], phis=count(shapes, r"phi\.(\d+)\."), **_autoencoder(shapes)
    )


def _bsq(shapes: Shapes) -> BSQConfig:
    return BSQConfig(**_autoencoder(shapes))  # patchify shows only beside the transformer
