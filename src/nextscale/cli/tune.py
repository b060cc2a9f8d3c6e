from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nextscale.cli import complete
from nextscale.cli.evaluate import Batch, Lists, Out, Prompts, Quick, Quiet, Seeds, make_bench, read_lists
from nextscale.cli.options import Device, Dtype, Model, PixelBudget, SkipBad, Weights, load_pipeline
from nextscale.errors import NextscaleError


def tune(
    method: Annotated[
        str, typer.Argument(help="See `nextscale methods`.", autocompletion=complete.one_of(complete.METHODS))
    ],
    preset: Annotated[Path, typer.Option(help="The JSON file to write; --preset FILE reads it.")],
    max_drop: Annotated[
        list[str], typer.Option(help="What may be lost: scenes=0.01, ssim=0.02, perceptual=0.2. Repeatable.")
    ] = [],  # noqa: B006
    trials: Annotated[int, typer.Option(min=1, help="Settings to try.")] = 30,
    cost: Annotated[str, typer.Option(help="What to save: seconds, flops or tokens.")] = "seconds",
    space: Annotated[Path | None, typer.Option(help="Another search space, as JSON.", show_default=False)] = None,
    out: Out = Path("tune"),
    lists: Lists = "tuning",
    quick: Quick = False,
    prompts: Prompts = None,
    seeds: Seeds = 1,
    batch: Batch = 1,
    model: Model = None,
    weights: Weights = None,
    device: Device = None,
    dtype: Dtype = None,
    pixel_budget: PixelBudget = None,
    skip_bad: SkipBad = False,
    quiet: Quiet = False,
) -> None:
    """The fastest setting of a method whose measured loss stays within a budget."""
    from nextscale.io.writing import as_json, atomic_write, require_writable
    from nextscale.research.evaluate import session
    from nextscale.research.evaluate.report import COSTS
    from nextscale.research.evaluate.tune import as_preset, read_budget, read_space
    from nextscale.research.evaluate.tune import tune as search

    if cost not in COSTS:
        raise NextscaleError(f"unknown cost {cost!r}; allowed: {', '.join(COSTS)}")
    budget, fields, found = read_budget(max_drop), read_space(method, space), read_lists(lists)
    require_writable(preset)
    with session.at_work(out):
        pipe = load_pipeline(model, weights, device, dtype, progress_bar=False)
        bench = make_bench(pipe, None, found, out, quick, prompts, seeds, batch, pixel_budget, skip_bad)
        best, done = search(bench, method, budget, fields, trials, cost, False if quiet else None)
    with atomic_write(preset) as file:
        file.write(as_json(as_preset(best, bench, budget, cost, trials)))
    for trial in sorted(done, key=lambda t: t.cost):
        mark = "*" if trial is best else " " if trial.excess(budget) else "+"
        lost = " ".join(f"{k} {v:.4f}" for k, v in trial.losses.items())
        changed = {k: v for k, v in trial.method.to_dict()["fields"].items() if k in fields}
        typer.echo(f"{mark} {cost} {trial.cost:.4g}  lost: {lost}  {json.dumps(changed)}")
    typer.echo("* chosen, + within the budget")
    typer.echo(f"wrote {preset}")
