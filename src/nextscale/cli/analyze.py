from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nextscale.cli import complete
from nextscale.cli.generate import read_prompt
from nextscale.cli.options import (
    AspectRatio,
    Device,
    Dtype,
    Model,
    PixelBudget,
    Prompt,
    Revision,
    Vae,
    Weights,
    load_pipeline,
)


def analyze(
    prompt: Prompt,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file with a prompt per line, or category<TAB>prompt: figures of many images are over these.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Images of each of these prompts.")] = 1,
    out: Annotated[Path, typer.Option(help="The folder for images and data.")] = Path("analysis"),
    figures: Annotated[
        str | None,
        typer.Option(
            help="memory, flops, entropy, heatmaps, layers, spectra, token_spectra, activation, attention, kept, "
            "change, blocks; several as a,b. Default: these. Only by name, for they take many runs: saliency, "
            "layer_roles, scale_depth, exit_measures, exit_blocks, restored, shares; or all.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="For the kept maps and for settings, as in `nextscale compare`. Default: all that choose tokens.",
            autocompletion=complete.methods,
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="One HTML page with all figures.", show_default=False)] = None,
    model: Model = None,
    weights: Weights = None,
    seed: Annotated[int, typer.Option(help="Of all images.")] = 0,
    aspect_ratio: AspectRatio = None,
    pixel_budget: PixelBudget = None,
    vae: Vae = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
) -> None:
    """Draw the papers' figures for a model: entropies, spectra, layers, what methods keep.

    `nextscale analyze restored`, the name of a figure alone, draws that figure for an example prompt.
    """
    from nextscale.io.writing import require_folder, require_writable
    from nextscale.methods.naming import parse_methods
    from nextscale.research.analyze.band import read_prompts
    from nextscale.research.analyze.data import store
    from nextscale.research.analyze.figures import EXAMPLE, EXAMPLE_LABEL, FIGURES, Figure, get_figures
    from nextscale.research.analyze.report import write_report
    from nextscale.research.analyze.runs import warnings_once
    from nextscale.research.analyze.study import Study
    from nextscale.research.analyze.style import require_matplotlib

    named = figures is None and prompt in FIGURES
    wanted = get_figures(prompt if named else figures)
    if methods is not None:
        parse_methods(methods)  # before a model is loaded for nothing
    require_folder(out)
    if report is not None:
        require_writable(report)
    require_matplotlib()
    pipe = load_pipeline(model, weights, device, dtype, vae=vae, revision=revision)
    chosen = None if methods is None else parse_methods(methods, pipe.spec.name)
    labels = pipe.backbone.prompts == "label"
    size: dict[str, Any] = {"aspect_ratio": aspect_ratio, "pixel_budget": pixel_budget}
    if named:
        prompt = str(EXAMPLE_LABEL) if labels else EXAMPLE
    subject = read_prompt(prompt) if labels else prompt
    asked = [] if prompts is None else read_prompts(prompts, labels)
    study = Study(pipe, subject, seed, asked, seeds, chosen, size)
    drawn: dict[Path, tuple[Figure, Path]] = {}
    with warnings_once():
        study.check(any(f.runs_methods for f in wanted), any(f.needs_nova for f in wanted))
        for figure in wanted:
            data = figure.measure(study)
            stored, path = store(data, out, figure.name), out / f"{figure.name}.png"
            figure.draw(data, path)
            drawn[path] = (figure, stored)
            for line in [] if figure.table is None else figure.table(data):
                typer.echo(line)
            typer.echo(f"wrote {path} and {stored.name}")
    if report is not None:
        grids = pipe.schedule(**size).grids
        facts = {
            "seed": seed,
            "images of bands and means": _images(study.prompts, prompts, seeds),
            "schedule": ", ".join(f"{h}×{w}" for h, w in grids),
            "methods": ", ".join(study.methods or ()),
        }
        write_report(report, pipe.spec.name, subject, facts, drawn)
        typer.echo(f"wrote {report}")


def _images(asked: Sequence[Any], file: Path | None, seeds: int) -> str:
    of = "this prompt" if file is None else f"{len(asked)} of {file.name}"
    return of if seeds == 1 else f"{of}, {seeds} seeds each"
