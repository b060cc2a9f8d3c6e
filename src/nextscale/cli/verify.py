from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextscale.cli.options import console

if TYPE_CHECKING:
    from nextscale.research.verify import Verification


def verify(
    case: Annotated[Path, typer.Argument(help="Folder with config.json, state, vae and io .safetensors.")],
    mutate: Annotated[bool, typer.Option("--mutate", help="Change one weight first; must then fail.")] = False,
    device: Annotated[str, typer.Option(help="Where our side runs; the recordings are from a CPU.")] = "cpu",
    picture: Annotated[Path | None, typer.Option(help="Draw the decoded images of every run.")] = None,
) -> None:
    """Play recorded runs of the official code and compare number by number.

    Exit code 0 only if every token and bit is equal and every float within its tolerance.
    """
    from nextscale.io.devices import as_device
    from nextscale.io.images import image_paths, save_all
    from nextscale.research.verify import verify as play

    paths = [] if picture is None else image_paths(picture, 1)
    report = play(case, mutate="" if mutate else None, keep_pictures=bool(paths), device=as_device(device))
    show(report)
    if paths:
        from nextscale.research.verify.sheet import sheet

        save_all([sheet(report)], paths)
        typer.echo(f"wrote {paths[0]}")
    raise typer.Exit(0 if report.ok else 1)


def show(report: Verification) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title, justify in (
        ("quantity", "left"),
        ("tensors", "right"),
        ("largest error", "right"),
        ("tolerance", "right"),
    ):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("", no_wrap=True)
    for c in report.checks:
        if c.tolerance == 0:
            error, allowed, verdict = f"{c.error:g}", "equal", "equal" if c.ok else "NOT EQUAL"
        else:
            error, allowed, verdict = f"{c.error:.1e}", f"{c.tolerance:g}", "ok" if c.ok else "OFF"
        text = Text(verdict) if c.ok else Text.assemble((verdict, "red"), f", first {c.first_off}")
        table.add_row(c.quantity, str(c.tensors), error, allowed, text)
    console().print(table)
    if report.mutated:
        typer.echo(f"one number of {report.mutated} was changed before the runs")
    if report.not_compared:
        typer.echo(f"recorded, but unknown here and not compared: {', '.join(report.not_compared)}")
    wrong = [c for c in report.checks if not c.ok]
    typer.echo(f"{len(report.checks) - len(wrong)} of {len(report.checks)} quantities agree")
