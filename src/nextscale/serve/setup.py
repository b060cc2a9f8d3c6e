"""From options to an engine: everything is checked before a model is loaded, and then they are."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nextscale.checkpoints import locate, pretrained
from nextscale.checkpoints.pretrained import Blueprint
from nextscale.engine.model import Model
from nextscale.errors import NextscaleError, choices
from nextscale.io.arguments import read_count, read_list, read_number, short_repr
from nextscale.io.devices import as_device, as_dtype
from nextscale.methods.naming import parse_method
from nextscale.models.fp8 import check_quantize
from nextscale.models.registry import EMBEDDED
from nextscale.runtime.registry import check_runtime
from nextscale.serve.engine import Limits
from nextscale.serve.served_model import AUTO, ServedModel, Size, served_sizes

ON_GPU = 8  # images of a batch; on a CPU a larger batch gains nothing


@dataclass(frozen=True)
class ServeOptions:
    """What `nextscale serve` and a Ray Serve config say of the models and the engine."""

    model: tuple[str, ...] = ()  # names or paths; empty: the small one of the package
    method: str = AUTO
    max_batch: int | None = None
    max_queue: int = 64
    batch_wait_ms: float = 5.0
    api_key: str | None = None
    runtime: str | None = None
    warm: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    cors_origin: tuple[str, ...] = ()

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ServeOptions:
        """Read a config, whose names are those of the command line."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := [name for name in given if name not in fields]:
            raise NextscaleError(f"user_config has no field {short_repr(unknown[0])}; allowed: {choices(fields)}")
        read: dict[str, Any] = {}
        for name, value in given.items():
            if name in ("model", "cors_origin"):
                values = (
                    [value] if isinstance(value, str) else read_list(value, f"user_config {name}", "a list of texts")
                )
                value = tuple(_text(v, name) for v in values)
            elif name in ("max_batch", "max_queue"):
                value = read_count(value, f"user_config {name}", 1, 100_000)
            elif name == "batch_wait_ms":
                if not 0 <= read_number(value, f"user_config {name}") <= 10_000:
                    raise NextscaleError(f"user_config {name} must be from 0 to 10000, not {short_repr(value)}")
            elif value is not None:
                _text(value, name)
            read[name] = value
        return cls(**read)

    def resolved(self) -> ServeOptions:
        """Check everything that needs no model, and fill in what depends on the device."""
        if self.method != AUTO:
            parse_method(self.method)
        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise NextscaleError("the API key must be letters, digits and signs of ASCII, without spaces")
        for origin in self.cors_origin:
            read_origin(origin)
        sizes = read_sizes(self.warm)
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = as_device(device).type == "cuda"
        dtype = self.dtype or ("bfloat16" if on_gpu else "float32")
        runtime = self.runtime or ("graphs" if on_gpu else "eager")
        as_dtype(dtype)
        check_runtime(runtime)
        check_quantize(self.quantize, as_device(device))
        models = find_models(self.model)
        if sizes:
            require_sizes(sizes, [sizes_of(blueprint) for blueprint in models.values()])
        return dataclasses.replace(
            self,
            model=tuple(models),
            max_batch=self.max_batch or (ON_GPU if on_gpu else 1),
            device=device,
            dtype=dtype,
            runtime=runtime,
        )

    def load(self) -> list[ServedModel]:
        """Load the models of resolved options."""
        options = {name: getattr(self, name) for name in ("method", "device", "dtype", "runtime", "quantize")}
        models = [ServedModel.load(source, **options) for source in self.model]
        add_warm_sizes(models, read_sizes(self.warm))
        return models

    @property
    def limits(self) -> Limits:
        assert self.max_batch is not None, "resolved() chooses it"
        return Limits(max_batch=self.max_batch, max_queue=self.max_queue, batch_wait=self.batch_wait_ms / 1000)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise NextscaleError(f"user_config {name} must be a text, not {short_repr(value)}")
    return value


def find_models(asked: Sequence[str]) -> dict[str, Blueprint]:
    """Models that are there and can be told apart, by what they were asked for; nothing is loaded yet."""
    names: dict[str, str] = {}
    found: dict[str, Blueprint] = {}
    for source in asked or [EMBEDDED.name]:
        blueprint = pretrained.read(locate.locate(source, None, None, locate.Hub()))
        name = blueprint.spec.name
        if name in names:
            raise NextscaleError(f"--model {names[name]!r} and {source!r} are both named {name}; serve one of them")
        names[name], found[source] = source, blueprint
    return found


def sizes_of(blueprint: Blueprint) -> list[Size]:
    """The sizes of a model that is not loaded."""
    backbone, tokenizer = blueprint.backbone.outline(), blueprint.tokenizer.outline()
    last = Model(backbone, tokenizer, blueprint.spec).schedule().last
    square = last[1] * tokenizer.stride, last[0] * tokenizer.stride
    return served_sizes(blueprint.spec, square, tokenizer.stride)[1]


def read_sizes(text: str | None) -> list[Size]:
    """Read WIDTHxHEIGHT,..."""
    sizes = []
    for part in () if text is None else text.split(","):
        size = re.fullmatch(r"\s*([1-9]\d{1,4})x([1-9]\d{1,4})\s*", part, re.ASCII)
        if size is None:
            raise NextscaleError(f"--warm {text!r} is not a list of sizes such as 512x512,640x384")
        sizes.append((int(size[1]), int(size[2])))
    return sizes


def require_sizes(sizes: Sequence[Size], served: Sequence[Sequence[Size]]) -> None:
    """Refuse a size to be warm for that none of the models has."""
    known = list(dict.fromkeys(itertools.chain(*served)))
    for width, height in sizes:
        if (width, height) not in known:
            allowed = choices(f"{w}x{h}" for w, h in known)
            raise NextscaleError(f"--warm {width}x{height} is not a size of the model; allowed: {allowed}")


def add_warm_sizes(models: list[ServedModel], sizes: list[Size]) -> None:
    """Tell every model which of the sizes it is to be warm for."""
    for model in models:
        able = [size for size in sizes if size in model.sizes]
        model.warm_sizes = list(dict.fromkeys((*model.warm_sizes, *able)))


def read_origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"https?://[^/\s,?#]+", text):
        raise NextscaleError(f"--cors-origin {text!r} is not an origin such as https://example.com, nor '*'")
    return text
