from __future__ import annotations

import dataclasses
import platform

import typer

from nextscale.cli.options import console
from nextscale.version import __version__, installed_version


def models() -> None:
    """List the published models."""
    from rich.table import Table

    from nextscale.models.registry import MODELS

    table = Table("model", "depth", "width", "what", "files in the hub repository", box=None, pad_edge=False)
    for spec in MODELS.values():
        files = f"{spec.repo}: {spec.weights}, {spec.tokenizer_files[0]}" if spec.repo else "-"
        table.add_row(spec.name, str(spec.backbone.depth), str(spec.backbone.width), spec.notes, files)
    console().print(table)


def methods() -> None:
    """List the acceleration methods and their settings."""
    from nextscale.methods import METHODS

    for cls in METHODS.values():
        typer.echo(f"{cls.name}: {cls.summary}" + (f" [{cls.paper}]" if cls.paper else ""))
        for f in dataclasses.fields(cls):
            typer.echo(f"    {f.name} = {getattr(cls(), f.name)!r}")


def env() -> None:
    """Say what this machine and installation can do."""
    import torch

    from nextscale.kernels.sdpa import backends

    typer.echo(f"nextscale       {__version__}")
    typer.echo(f"python          {platform.python_version()} on {platform.platform()}")
    typer.echo(
        f"torch           {torch.__version__} (CUDA {torch.version.cuda or 'no'}), {torch.get_num_threads()} threads"
    )
    for name in ("transformers", "safetensors", "huggingface_hub", "triton"):
        typer.echo(f"{name:<15} {installed_version(name) or 'not installed'}")
    typer.echo(f"devices         {', '.join(_devices())}")
    for device, names in backends().items():
        typer.echo(f"attention       {device}: {', '.join(names)}")


def _devices() -> list[str]:
    import torch

    found = ["cpu"]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append(f"cuda:{i} ({p.name}, {p.total_memory / 2**30:.0f} GiB)")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found
