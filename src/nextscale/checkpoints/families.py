"""Every family of official files, and how a state dict is recognized and renamed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nextscale.checkpoints import hart, infinity, var
from nextscale.checkpoints.family import Family
from nextscale.checkpoints.files import StateFile
from nextscale.errors import NextscaleError
from nextscale.text.words import WordsConfig, WordTransformer

# The embedded model's text encoder: only ever in our own converted files, so there is nothing to recognize.
WORDS = Family(
    name="words",
    title="a word encoder",
    module=WordTransformer,
    config=WordsConfig,
    recognize=lambda keys: False,
    rename=(),
    ignored="$^",
    infer=lambda shapes, state: None,
)
FAMILIES = {
    f.name: f for f in (var.FAMILY, infinity.FAMILY, hart.FAMILY, var.TOKENIZER, infinity.TOKENIZER, hart.TOKENIZER)
}


def backbones() -> tuple[str, ...]:
    return tuple(f.name for f in FAMILIES.values() if f.tokenizer)


def family_of(keys: Iterable[str]) -> Family | None:
    """The family of a state dict."""
    known = set(keys)
    return next((family for family in FAMILIES.values() if family.recognize(known)), None)


def rename(family: Family, keys: Iterable[str]) -> dict[str, str]:
    """Map official keys to our parameter names, without the ignored buffers."""
    names = {key: key for key in keys if not re.search(family.ignored, key)}
    names = _unchunked(names)
    for pattern, replacement in family.rename:
        names = {key: re.sub(pattern, replacement, name) for key, name in names.items()}
    if len(set(names.values())) != len(names):
        raise NextscaleError("the checkpoint names a tensor twice, with and without its inner name")
    return names


def _unchunked(names: dict[str, str]) -> dict[str, str]:
    """Map `block_chunks.a.module.b` to `blocks.n`: the chunks only shaped the sharding of training."""
    chunk = re.compile(r"block_chunks\.(\d+)\.module\.(\d+)\.")
    length = 1 + max((int(m.group(2)) for m in map(chunk.match, names) if m), default=0)

    def flat(name: str) -> str:
        return chunk.sub(lambda m: f"blocks.{int(m.group(1)) * length + int(m.group(2))}.", name)

    return {key: flat(name) for key, name in names.items()}


def infer_config(family: Family, state: StateFile, names: Mapping[str, str]) -> Any:
    """Infer the configuration from the shapes; `names` maps the file's keys to ours."""
    shapes = {ours: state.infos[theirs].shape for theirs, ours in names.items()}
    try:
        return family.infer(shapes, state)
    except KeyError as error:
        raise NextscaleError(f"{state.path} lacks the tensor {error.args[0]!r}") from None
    except NextscaleError as error:
        raise NextscaleError(f"{state.path} does not hold {family.title} that can be made: {error}") from None
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        raise NextscaleError(f"{state.path} has tensors of other shapes than {family.title}") from None
