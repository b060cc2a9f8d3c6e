"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console

from nextscale.errors import NextscaleError
from nextscale.methods import Compose, Method, get_method
from nextscale.methods.naming import read_field
from nextscale.models.registry import EMBEDDED, get_model

PixelBudget = Annotated[
    str | None, typer.Option(help="0.06M, 0.25M, 0.60M, 1M, or 4M, which is beyond all training", show_default=False)
]
Model = Annotated[
    str | None,
    typer.Option(
        help="See `nextscale models`; default: the small one that comes with the package.", show_default=False
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(help="Official file or folder, converted folder, or hub repository.", show_default=False),
]
Vae = Annotated[str | None, typer.Option(help="The tokenizer's file, if not beside the weights.", show_default=False)]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help="Leave out and list prompts that cannot be drawn, instead of stopping."),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default=False)]


def console() -> Console:
    """On a pipe there is no width to respect, and a cut name is no name."""
    return Console(width=None if sys.stdout.isatty() else 200)


def source_of(model: str | None, weights: str | None) -> str:
    if model is not None:
        get_model(model)
    return weights or model or EMBEDDED.name


def method_of(name: str | None, preset: str | None, settings: list[str]) -> Method | None:
    """`--method nova --preset paper --set alpha=0.4`; parts of a composition are joined by '+'."""
    if name is None:
        if preset or settings:
            raise NextscaleError("--preset and --set need --method")
        return None
    parts = name.split("+")
    if len(parts) > 1:
        if preset or settings:
            raise NextscaleError("--preset and --set are for one method; give a composition as its parts alone")
        return Compose(tuple(get_method(part)() for part in parts))
    cls = get_method(name)
    method = cls() if preset is None else cls.preset(preset)
    wrong = next((s for s in settings if "=" not in s), None)
    if wrong is not None:
        raise NextscaleError(f"--set {wrong!r} is not of the form field=value")
    # All at once: fields may only be right together.
    return dataclasses.replace(method, **{k: v for s in settings for k, v in read_field(method, s).items()})


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    return "bfloat16" if device.startswith("cuda") else "float32"
