from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nextscale.cli.options import console, default_device


def score(
    folder: Annotated[Path, typer.Argument(help="Images (.png, .jpg), also in folders below, or an export.")],
    metrics: Annotated[
        str,
        typer.Option(
            help="psnr, ssim, perceptual, lpips (to the same image in --reference); frechet, kernel, fid, kid "
            "(to all images in --reference); clip, imagereward, hpsv2 (to --prompts). Several as a,b."
        ),
    ],
    reference: Annotated[Path | None, typer.Option(help="The folder to compare with.", show_default=False)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A .json file {image: prompt}, or a text file with a line per image.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write all values as JSON.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No bars, no table.")] = False,
) -> None:
    """Score a folder of images."""
    from nextscale.io.writing import as_json, atomic_write, require_writable
    from nextscale.research.evaluate.score import score as compute
    from nextscale.research.evaluate.score_metrics import get_metrics

    asked = get_metrics(metrics)
    if out is not None:
        require_writable(out)
    scores = compute(folder, asked, reference, prompts, device or default_device(), False if quiet else None)
    if out is not None:
        content = {
            "folder": str(folder),
            "reference": None if reference is None else str(reference),
            "prompts": None if prompts is None else str(prompts),
            "metrics": {s.metric.name: s.to_dict() for s in scores},
        }
        with atomic_write(out) as file:
            file.write(as_json(content))
    if quiet:
        return
    from rich.table import Table

    table = Table("metric", "value", "95 % interval", "better", "images", "what", box=None, pad_edge=False)
    for s in scores:
        between = "-" if s.interval is None else f"{s.interval[0]:.4g} to {s.interval[1]:.4g}"
        count = str(s.images) if s.interval is not None else f"{s.images} and {s.references}"
        better = "higher" if s.metric.higher else "lower"
        table.add_row(s.metric.name, f"{s.value:.4g}", between, better, count, s.metric.summary)
    console().print(table)
    if out is not None:
        typer.echo(f"wrote {out}")
