from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nextscale.cli.generate import read_prompt
from nextscale.cli.options import Model, Revision, Vae, Weights, default_device, default_dtype, method_of, source_of


def compare(
    prompt: Annotated[str, typer.Argument(help="What the picture shows, or a class number for VAR.")],
    model: Model = None,
    weights: Weights = None,
    method: Annotated[str, typer.Option(help="See `nextscale methods`; several as a+b.")] = "nova",
    preset: Annotated[str | None, typer.Option(help="Stored settings of the method: a name or a file.")] = None,
    set_: Annotated[list[str], typer.Option("--set", help="field=value of the method, repeatable.")] = [],  # noqa: B006
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("compare.png"),
    vae: Vae = None,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, else float32.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
    revision: Revision = None,
) -> None:
    """Make a picture without and with a method, and draw both with the maps of what was computed."""
    from nextscale.analyze.comparison import draw_comparison, require_matplotlib
    from nextscale.images import image_paths
    from nextscale.pipeline import Pipeline

    (path,) = image_paths(out, 1)
    require_matplotlib()
    reduction = method_of(method, preset, set_)
    device = device or default_device()
    pipe = Pipeline.from_pretrained(
        source_of(model, weights),
        model=model,
        vae=vae,
        dtype=dtype or default_dtype(device),
        device=device,
        revision=revision,
    )
    subject = read_prompt(prompt) if pipe.backbone.prompts == "label" else prompt
    pipe(subject, seed=seed, method=reduction)  # warm-up, not counted
    fast = pipe(subject, seed=seed, method=reduction)
    plain = pipe(subject, seed=seed)
    comparison = draw_comparison(plain, fast, str(prompt), path)
    typer.echo(fast.trace.summary())
    typer.echo(comparison)
    typer.echo(f"wrote {path}")
