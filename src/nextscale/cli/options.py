"""Options that several commands share."""

from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer
from rich.console import Console

from nextscale.errors import NextscaleError
from nextscale.models.registry import get_model

Model = Annotated[str | None, typer.Option(help="A published model (see `nextscale models`).", show_default=False)]
Weights = Annotated[
    str | None,
    typer.Option(help="Official file or folder, converted folder, or hub repository.", show_default=False),
]
Vae = Annotated[str | None, typer.Option(help="The tokenizer's file, if not beside the weights.", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default=False)]


def console() -> Console:
    """On a pipe there is no width to respect, and a cut name is no name."""
    return Console(width=None if sys.stdout.isatty() else 200)


def source_of(model: str | None, weights: str | None) -> str:
    if model is not None:
        get_model(model)
    source = weights or model
    if source is None:
        raise NextscaleError("say which model: --model NAME (see `nextscale models`), --weights PATH, or both")
    return source


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    return "bfloat16" if device.startswith("cuda") else "float32"
