"""The command line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from nextscale.cli.analyze import analyze
from nextscale.cli.calibrate import app as calibrate
from nextscale.cli.compare import compare
from nextscale.cli.convert import convert
from nextscale.cli.ending import exit_code
from nextscale.cli.evaluate import app as evaluate
from nextscale.cli.export import export
from nextscale.cli.generate import generate
from nextscale.cli.info import env, methods, models
from nextscale.cli.score import score
from nextscale.cli.serve import serve
from nextscale.cli.tune import tune
from nextscale.cli.verify import verify
from nextscale.cli.words import words
from nextscale.version import __version__

app = typer.Typer(
    help="Fast inference for next-scale image generators (VAR, Infinity, HART).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # nextscale[plot] is no markup
)
app.add_typer(calibrate, name="calibrate")
app.add_typer(evaluate, name="eval")
for command in (generate, compare, serve, analyze, words, models, methods, env, verify, convert, export, score, tune):
    app.command()(command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nextscale {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 a comparison failed or the machine gave up, 2 something given
    cannot be used, 70 a fault of ours, 130 stopped by Ctrl-C, 141 nobody reads the output any more."""
    sys.exit(exit_code(app))
