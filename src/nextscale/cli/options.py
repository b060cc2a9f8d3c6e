"""Options that several commands share."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nextscale.cli import complete
from nextscale.errors import NextscaleError

if TYPE_CHECKING:
    from rich.console import Console

    from nextscale.methods import Method
    from nextscale.pipeline import Pipeline

Prompt = Annotated[str, typer.Argument(help="What the image shows, or a class number for VAR.")]
PixelBudget = Annotated[
    str | None,
    typer.Option(
        help="0.06M, 0.25M, 0.60M, 1M, or 4M, which is beyond all training",
        show_default=False,
        autocompletion=complete.one_of(complete.PIXEL_BUDGETS),
    ),
]
AspectRatio = Annotated[float | None, typer.Option(help="height / width", show_default=False)]
Model = Annotated[
    str | None,
    typer.Option(
        help="See `nextscale models`; default: the small one that comes with the package.",
        show_default=False,
        autocompletion=complete.one_of(complete.MODELS),
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
OneMethod = Annotated[
    str | None,
    typer.Option(
        help="See `nextscale methods`; with settings as nova:balanced, several at once as nova:balanced+truncate:1.",
        autocompletion=complete.methods,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(help="Stored settings of the method: a name or a file.", autocompletion=complete.presets),
]
Settings = Annotated[list[str], typer.Option("--set", help="field=value of the method, repeatable.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="Default: bfloat16 on a GPU, else float32.", autocompletion=complete.one_of(complete.DTYPES)),
]
Device = Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")]


def console() -> Console:
    """Make a console with long lines on a pipe or narrow terminal: a cut name is no name."""
    from rich.console import Console

    plain = Console(markup=False, emoji=False, highlight=False)
    if not sys.stdout.isatty():
        plain.width = 200
    return plain if plain.width >= 80 else Console(width=80, markup=False, emoji=False, highlight=False)


def load_pipeline(
    model: str | None, weights: str | None, device: str | None, dtype: str | None = None, **options: Any
) -> Pipeline:
    """Load what --model, --weights, --device and --dtype name; `options` are those of `from_pretrained`."""
    from nextscale.pipeline import Pipeline

    source, device = source_of(model, weights), device or default_device()
    dtype = dtype or default_dtype(device)
    return Pipeline.from_pretrained(source, model=model, dtype=dtype, device=device, **options)


def source_of(model: str | None, weights: str | None) -> str:
    from nextscale.models.registry import EMBEDDED, get_model

    if model is not None:
        get_model(model)
    if weights is not None and not weights.strip():
        raise NextscaleError("--weights is empty; leave it out for the model that comes with the package")
    return weights or model or EMBEDDED.name


def method_of(
    name: str | None, preset: str | None, settings: list[str], model: str | None = None, quiet: bool = True
) -> Method | None:
    """Read `--method nova --preset paper --set alpha=0.4`, or the same in one word: `nova:paper;alpha=0.4`.

    Once the model's name is known, a bare name is the preset that was measured on it.
    """
    from nextscale.methods import Compose
    from nextscale.methods.naming import format_method, parse_method, with_settings

    method = None if name is None else parse_method(name)
    if not preset and not settings:
        own = None if name is None else parse_method(name, model)
        if own != method and not quiet:
            typer.echo(f"{name} is {format_method(own)}: as measured on {model}")
        return own
    if name is None or method is None:
        raise NextscaleError("--preset and --set need --method")
    if isinstance(method, Compose):
        raise NextscaleError("--preset and --set are for one method; write those of a composition's parts behind ':'")
    if preset:
        if ":" in name:
            raise NextscaleError(f"--preset is for a method's bare name, and --method {name} has settings of its own")
        method = type(method).preset(preset)
    wrong = next((s for s in settings if "=" not in s), None)
    if wrong is not None:
        raise NextscaleError(f"--set {wrong!r} is not of the form field=value")
    return with_settings(method, settings)


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    return "bfloat16" if device.startswith("cuda") else "float32"
