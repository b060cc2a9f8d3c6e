from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from nextscale.cli import complete
from nextscale.cli.options import (
    Device,
    Model,
    Settings,
    Vae,
    Weights,
    default_device,
    default_dtype,
    method_of,
    source_of,
)
from nextscale.errors import NextscaleError

app = typer.Typer(help="Fit a method's settings to a model.", no_args_is_help=True)
Prompts = Annotated[Path, typer.Option(help="A file with one prompt (or class number) per line, at least 64.")]
Out = Annotated[Path, typer.Option(help="The JSON file to write.")]
Guidance = Annotated[float | None, typer.Option(help="Default: what the authors use.")]


@app.command()
def toprovar(
    prompts: Prompts,
    out: Out,
    target: Annotated[float, typer.Option(help="Share of the tokens to compute.")] = 0.3,
    model: Model = None,
    weights: Weights = None,
    vae: Vae = None,
    guidance_scale: Guidance = None,
    device: Device = None,
) -> None:
    """tau, beta and a_max of ToProVAR, as a preset."""
    from nextscale.calibrate.toprovar import calibrate_toprovar

    _run(calibrate_toprovar, prompts, out, model, weights, vae, device, target=target, guidance_scale=guidance_scale)


@app.command()
def skipvar(
    prompts: Prompts,
    out: Out,
    target: Annotated[float, typer.Option(help="SSIM that a shortcut must keep.")] = 0.88,
    model: Model = None,
    weights: Weights = None,
    vae: Vae = None,
    guidance_scale: Guidance = None,
    device: Device = None,
) -> None:
    """SkipVAR's decision (needs scikit-learn: pip install 'nextscale[calibrate]')."""
    from nextscale.calibrate.skipvar import calibrate_skipvar

    _run(calibrate_skipvar, prompts, out, model, weights, vae, device, target=target, guidance_scale=guidance_scale)


@app.command()
def shares(
    prompts: Prompts,
    out: Out,
    method: Annotated[
        str, typer.Option(help="The method to measure, e.g. sparsevar:hart.", autocompletion=complete.methods)
    ] = "sparsevar",
    set_: Settings = [],  # noqa: B006
    model: Model = None,
    weights: Weights = None,
    vae: Vae = None,
    guidance_scale: Guidance = None,
    device: Device = None,
) -> None:
    """The share of tokens that a method drops at each scale, as a table for NOVA(scale_linkage=False)."""
    from nextscale.calibrate.shares import measure_shares

    measured = method_of(method, None, set_)
    _run(measure_shares, prompts, out, model, weights, vae, device, method=measured, guidance_scale=guidance_scale)


def _run(
    calibrate: Callable[..., dict[str, Any]],
    prompts: Path,
    out: Path,
    model: str | None,
    weights: str | None,
    vae: str | None,
    device: str | None,
    **options: Any,
) -> None:
    from nextscale.pipeline import Pipeline
    from nextscale.writing import require_writable, whole_file

    require_writable(out)
    try:
        lines = [line.strip() for line in prompts.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise NextscaleError(f"{prompts} cannot be read: {error}") from None
    device = device or default_device()
    pipe = Pipeline.from_pretrained(
        source_of(model, weights), model=model, vae=vae, dtype=default_dtype(device), device=device
    )
    asked: list[Any] = lines
    if pipe.backbone.prompts == "label":
        try:
            asked = [int(line) for line in lines]
        except ValueError:
            raise NextscaleError(f"{prompts} must hold class numbers, one per line, for this model") from None
    result = calibrate(pipe, asked, **options)
    with whole_file(out) as file:
        file.write((json.dumps(result, indent=1) + "\n").encode())
    typer.echo(f"wrote {out}")
