from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nextscale.cli import complete
from nextscale.cli.options import (
    Device,
    Model,
    Settings,
    SkipBad,
    Vae,
    Weights,
    method_of,
)
from nextscale.cli.workers import Address, Replicas, Resources, WorkersKind, pipelines, read_placement

if TYPE_CHECKING:
    from nextscale.cluster.placement import Placement

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
    skip_bad: SkipBad = False,
    workers: WorkersKind = "local",
    address: Address = None,
    replicas: Replicas = None,
    resources: Resources = None,
) -> None:
    """tau, beta and a_max of ToProVAR, as a preset."""
    from nextscale.research.calibrate.toprovar import calibrate_toprovar

    options = {"target": target, "guidance_scale": guidance_scale}
    placement = read_placement(workers, address, replicas, resources)
    _run(calibrate_toprovar, prompts, out, model, weights, vae, device, skip_bad, placement, options)


@app.command()
def sparsevar(
    prompts: Prompts,
    out: Out,
    target: Annotated[float, typer.Option(help="Share of the tokens to exclude from the sparse scales.")] = 0.5,
    model: Model = None,
    weights: Weights = None,
    vae: Vae = None,
    guidance_scale: Guidance = None,
    device: Device = None,
    skip_bad: SkipBad = False,
    workers: WorkersKind = "local",
    address: Address = None,
    replicas: Replicas = None,
    resources: Resources = None,
) -> None:
    """The block of SparseVAR whose images are nearest to the plain ones, and tau, as a preset."""
    from nextscale.research.calibrate.sparsevar import calibrate_sparsevar

    options = {"target": target, "guidance_scale": guidance_scale}
    placement = read_placement(workers, address, replicas, resources)
    _run(calibrate_sparsevar, prompts, out, model, weights, vae, device, skip_bad, placement, options)


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
    skip_bad: SkipBad = False,
    workers: WorkersKind = "local",
    address: Address = None,
    replicas: Replicas = None,
    resources: Resources = None,
) -> None:
    """SkipVAR's decision."""
    from nextscale.research.calibrate.skipvar import calibrate_skipvar

    options = {"target": target, "guidance_scale": guidance_scale}
    placement = read_placement(workers, address, replicas, resources)
    _run(calibrate_skipvar, prompts, out, model, weights, vae, device, skip_bad, placement, options)


@app.command()
def taper(
    prompts: Prompts,
    out: Out,
    model: Model = None,
    weights: Weights = None,
    vae: Vae = None,
    guidance_scale: Guidance = None,
    device: Device = None,
    skip_bad: SkipBad = False,
    workers: WorkersKind = "local",
    address: Address = None,
    replicas: Replicas = None,
    resources: Resources = None,
) -> None:
    """How uncertain cells are and what budgets come to, for Taper(entropies=FILE)."""
    from nextscale.research.calibrate.taper import calibrate_taper

    options = {"guidance_scale": guidance_scale}
    placement = read_placement(workers, address, replicas, resources)
    _run(calibrate_taper, prompts, out, model, weights, vae, device, skip_bad, placement, options)


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
    skip_bad: SkipBad = False,
    workers: WorkersKind = "local",
    address: Address = None,
    replicas: Replicas = None,
    resources: Resources = None,
) -> None:
    """The share of tokens that a method drops at each scale, as a table for NOVA(scale_linkage=False)."""
    from nextscale.research.calibrate.shares import measure_shares

    options = {"method": method_of(method, None, set_), "guidance_scale": guidance_scale}
    placement = read_placement(workers, address, replicas, resources)
    _run(measure_shares, prompts, out, model, weights, vae, device, skip_bad, placement, options)


def _run(
    calibrate: Callable[..., dict[str, Any]],
    prompts: Path,
    out: Path,
    model: str | None,
    weights: str | None,
    vae: str | None,
    device: str | None,
    skip_bad: bool,
    placement: Placement | None,
    options: dict[str, Any],
) -> None:
    from nextscale.io.reading import read_lines
    from nextscale.io.writing import as_json, atomic_write, require_writable
    from nextscale.research.calibrate import require_enough
    from nextscale.research.prompt_checks import bad_prompts, refuse, skipped

    require_writable(out)
    lines = read_lines(prompts)
    require_enough(lines)  # before a model is loaded for nothing
    with pipelines(placement, model, weights, device, passes=True, vae=vae) as (pipe, hands):
        label = pipe.backbone.prompts == "label"
        asked: list[Any] = [
            (int(line) if label and line.isdecimal() and len(line) < 10 else line, number) for number, line in lines
        ]
        bad = bad_prompts(pipe, [(prompt, f"{prompts}, line {number}") for prompt, number in asked])
        refuse(bad, skip_bad, len(asked))
        left_out = {b.where for b in bad}
        left = [prompt for prompt, number in asked if f"{prompts}, line {number}" not in left_out]
        result = calibrate(pipe, left, workers=hands, **options)
    with atomic_write(out) as file:
        file.write(as_json({**result, "skipped": skipped(bad)}))
    if bad:
        typer.echo(f"{len(bad)} prompts were skipped")
    typer.echo(f"wrote {out}")
