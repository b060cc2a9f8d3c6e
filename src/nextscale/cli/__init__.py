"""The command line."""

from __future__ import annotations

import logging
import sys

import torch
import typer

from nextscale.cli.analyze import analyze
from nextscale.cli.calibrate import app as calibrate
from nextscale.cli.compare import compare
from nextscale.cli.convert import convert
from nextscale.cli.evaluate import app as evaluate
from nextscale.cli.export import export
from nextscale.cli.generate import generate
from nextscale.cli.info import env, methods, models
from nextscale.cli.score import score
from nextscale.cli.tune import tune
from nextscale.cli.verify import verify
from nextscale.cli.words import words
from nextscale.errors import NextscaleError

app = typer.Typer(
    help="Fast inference for next-scale image generators (VAR, Infinity, HART).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(calibrate, name="calibrate")
app.add_typer(evaluate, name="eval")
for command in (generate, compare, analyze, words, models, methods, env, verify, convert, export, score, tune):
    app.command()(command)


def main() -> None:
    """Exit codes: 0 done, 1 a comparison failed or the device gave up, 2 something given cannot be used."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        app()
    except NextscaleError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except torch.OutOfMemoryError as error:
        typer.echo(f"error: out of memory: {str(error).splitlines()[0]}", err=True)
        sys.exit(1)
