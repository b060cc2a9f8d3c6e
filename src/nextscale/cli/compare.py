from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextscale.cli import complete
from nextscale.cli.generate import read_prompt
from nextscale.cli.options import (
    AspectRatio,
    Device,
    Dtype,
    Model,
    PixelBudget,
    Preset,
    Prompt,
    Revision,
    Settings,
    Vae,
    Weights,
    console,
    load_pipeline,
    method_of,
)
from nextscale.errors import NextscaleError

if TYPE_CHECKING:
    from nextscale.methods.base import Method
    from nextscale.research.analyze.runs import MethodResult


def compare(
    prompt: Prompt,
    model: Model = None,
    weights: Weights = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Several methods against the plain run, as none,nova:paper,truncate:2: behind a colon a preset's "
            "name or file, a number for the first field, or field=value;field=value. '+' composes.",
            show_default=False,
            autocompletion=complete.methods,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="One method against the plain run; several at once as a+b. Default: nova.",
            autocompletion=complete.methods,
        ),
    ] = None,
    preset: Preset = None,
    set_: Settings = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of all images.")] = 0,
    out: Annotated[Path, typer.Option(help="The image.")] = Path("compare.png"),
    json_: Annotated[Path | None, typer.Option("--json", help="Write the table as JSON.", show_default=False)] = None,
    aspect_ratio: AspectRatio = None,
    pixel_budget: PixelBudget = None,
    vae: Vae = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
) -> None:
    """Make an image without and with methods; draw the images, their differences and where each computed."""
    from nextscale.io.images import image_paths
    from nextscale.io.writing import as_json, atomic_write, require_writable
    from nextscale.research.analyze.comparison import draw_comparison
    from nextscale.research.analyze.runs import compare_methods, warnings_once
    from nextscale.research.analyze.sheet import draw_sheet
    from nextscale.research.analyze.style import require_matplotlib

    (path,) = image_paths(out, 1)
    if json_ is not None:
        require_writable(json_)
    require_matplotlib()
    _methods(methods, method, preset, set_)  # before a model is loaded for nothing
    pipe = load_pipeline(model, weights, device, dtype, vae=vae, revision=revision)
    asked = _methods(methods, method, preset, set_, pipe.spec.name)
    subject = read_prompt(prompt) if pipe.backbone.prompts == "label" else prompt
    with warnings_once():
        results = compare_methods(pipe, subject, asked, seed, aspect_ratio=aspect_ratio, pixel_budget=pixel_budget)
    if methods is None:
        plain, fast = (m.output for m in results)
        comparison = draw_comparison(plain, fast, prompt, path)
        typer.echo(fast.trace.summary())
        typer.echo(comparison)
    else:
        draw_sheet(results, subject, path)
        _print_table(results)
    if json_ is not None:
        header = {k: v for k, v in results[0].output.trace.header.items() if k != "method"}
        table = {**header, "prompt": subject, "seed": seed, "methods": [m.row() for m in results]}
        with atomic_write(json_) as file:
            file.write(as_json(table))
        typer.echo(f"wrote {json_}")
    typer.echo(f"wrote {path}")


def _methods(
    several: str | None, one: str | None, preset: str | None, settings: list[str], model: str | None = None
) -> dict[str, Method | None]:
    from nextscale.methods.naming import PLAIN, parse_methods

    if several is None:
        return {"method": method_of(one or "nova", preset, settings, model, quiet=False)}
    if one or preset or settings:
        raise NextscaleError("give either --methods, or --method with --preset and --set")
    found = parse_methods(several, model)
    if set(found) == {PLAIN}:
        raise NextscaleError(f"--methods {several} names no method to compare with the plain run")
    return found


def _print_table(results: Sequence[MethodResult]) -> None:
    from rich.table import Table

    from nextscale.methods.naming import PLAIN
    from nextscale.research.evaluate.features import why_missing

    table = Table("method", box=None, pad_edge=False)
    for name in ("seconds", "ratio", "tokens", "of plain", "PSNR", "SSIM", "perceptual"):
        table.add_column(name, justify="right")
    for m in results:
        alike = (
            ("–", "–", "–")
            if m.name == PLAIN
            else ("same" if m.same else f"{m.psnr:.1f}", f"{m.ssim:.3f}", _number(m.perceptual))
        )
        table.add_row(m.name, f"{m.seconds:.2f}", f"{m.ratio:.2f}", f"{m.tokens:,}", f"{100 * m.share:.1f} %", *alike)
    console().print(table)
    typer.echo("timed once each, in this order, after a run that was not counted; ratio: plain seconds over seconds;")
    typer.echo("tokens: computed, over layers and guidance rows; PSNR (dB), SSIM and perceptual: against plain")
    if missing := why_missing():
        typer.echo(f"perceptual is not shown: {missing}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
