from __future__ import annotations

from typing import Annotated

import typer

from nextscale.cli.options import Model, Weights, source_of
from nextscale.errors import NextscaleError, choices


def words(
    kind: Annotated[str | None, typer.Argument(help="Only these, e.g. objects.", show_default=False)] = None,
    model: Model = None,
    weights: Weights = None,
) -> None:
    """List what a model with a closed vocabulary can draw; other ways to say it stand in brackets."""
    from nextscale.checkpoints import locate, pretrained
    from nextscale.text.words import ENTRY_KINDS, Lexicon

    kinds = ENTRY_KINDS[:-1]  # filler words mean nothing
    if kind is not None and kind not in kinds:
        raise NextscaleError(f"unknown kind {kind!r}; allowed: {choices(kinds)}")
    plan = pretrained.read(locate.locate(source_of(model, weights), model, None, locate.Hub()))
    if plan.words is None:
        raise NextscaleError(f"{plan.spec.name} reads any text: it has no vocabulary of its own")
    lexicon = Lexicon(plan.words)
    for name in kinds if kind is None else (kind,):
        entries = lexicon.of_kind(name)
        if not entries and kind is None:
            continue
        typer.echo(f"{name} ({len(entries)})")
        for entry in entries:
            typer.echo(f"    {entry.name}" + (f" ({', '.join(entry.also)})" if entry.also else ""))
