from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nextscale.cli.options import Model, Revision, Vae


def convert(
    source: Annotated[str, typer.Argument(help="Model name, official file or folder, or hub repository.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    model: Model = None,
    vae: Vae = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, for the matrix products.")] = "float32",
    revision: Revision = None,
) -> None:
    """Write a model as one safetensors file + config.json, which loads without guessing."""
    from nextscale.checkpoints import locate, pretrained
    from nextscale.checkpoints.convert import convert as write
    from nextscale.io.devices import as_dtype
    from nextscale.io.progress import bar

    target = as_dtype(dtype)
    plan = pretrained.read(locate.locate(source, model, vae, locate.Hub(revision)))
    with bar(f"convert {plan.spec.name}", plan.nbytes, None, data=True) as advance:
        write(plan, out, target, advance)
    size = sum(f.stat().st_size for f in out.iterdir())
    typer.echo(f"wrote {out} ({plan.spec.name}, {dtype}, {size / 2**20:.1f} MiB)")
