"""The description of the official files of one kind of module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nextscale.checkpoints.files import StateFile

Rules = tuple[tuple[str, str], ...]
Shapes = Mapping[str, tuple[int, ...]]  # by our names


@dataclass(frozen=True)
class Family:
    name: str
    title: str  # as it is called in an error sentence
    module: Any  # our class, made from `config`
    config: Any
    recognize: Callable[[set[str]], bool]  # by keys that no other family has
    rename: Rules  # official keys -> our parameter names
    ignored: str  # buffers that can be derived, or that only training reads
    infer: Callable[[Shapes, StateFile], Any]  # configuration from shapes, so that unknown sizes load too
    tokenizer: str | None = None  # of a transformer: the family of its tokenizer
    read_live: Callable[[Any, Any, Any, Any], tuple[Any, Any]] | None = (
        None  # what only a live object's attributes tell
    )


def count(names: Iterable[str], pattern: str) -> int:
    """Count the different numbers that the pattern's group matches: the length of a module list."""
    found = (re.match(pattern, name) for name in names)
    return len({m.group(1) for m in found if m})


def heads_of(shapes: Shapes, width: int) -> int:
    scale = shapes.get("blocks.0.attn.log_scale")
    if scale:
        return max(scale)
    heads = max(width // 64, 1)  # plain attention stores no trace of its heads
    return heads if width % heads == 0 else 1


def autoencoder(shapes: Shapes) -> dict[str, Any]:
    """The part of a tokenizer's configuration that describes its encoder and decoder."""
    channels = shapes["encoder.conv_in.weight"][0]
    levels = count(shapes, r"encoder\.down\.(\d+)\.")
    widths = [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(levels)]
    return {
        "code_dim": shapes["decoder.conv_in.weight"][1],
        "channels": channels,
        "multipliers": tuple(w // channels for w in widths),
        "residual_blocks": count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
    }


# Names that VAR and Infinity have in common.
COMMON_RENAMES: Rules = (
    (r"^pos_start$", "start_position"),
    (r"^lvl_embed\.", "level_embed."),
    (r"^shared_ada_lin\.", "shared_modulation."),
    (r"^head_nm\.ada_lin\.", "head_modulation."),
    (r"^head\.", "head_linear."),
    (r"\.ada_gss$", ".offset"),
    (r"\.ada_lin\.", ".modulation."),
    (r"\.scale_mul_1H11$", ".log_scale"),
    (r"\.mat_qkv\.", ".qkv."),
    (r"\.ffn\.", ".mlp."),
)
