from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from nextscale.cli import complete
from nextscale.cli.options import (
    Device,
    Dtype,
    Model,
    PixelBudget,
    SkipBad,
    Weights,
    console,
)
from nextscale.cli.workers import Address, Replicas, Resources, WorkersKind, pipelines, read_placement
from nextscale.errors import NextscaleError

app = typer.Typer(help="Measure methods: quality and cost in one table.", no_args_is_help=True)
Out = Annotated[Path, typer.Option(help="The folder of results; a run that was stopped goes on in it.")]
Lists = Annotated[
    str, typer.Option(help="Lists of prompts: white and full, by their backgrounds, and tuning, to choose settings on.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="2 prompts of each task and background, one seed: minutes on a CPU.")
]
Prompts = Annotated[int | None, typer.Option(min=1, help="Prompts of each task and background. Default: all.")]
Seeds = Annotated[int, typer.Option(min=1, help="Images of each prompt.")]
Batch = Annotated[int, typer.Option(min=1, help="Images at a time; seconds are per image of such a batch.")]
Reference = Annotated[
    bool, typer.Option(help="Also as many plain images of other seeds, for Fréchet and kernel distance.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No bars.")]
BOTH = "white,full"
QUICK = 2  # prompts of each task and background


@app.command()
def scenes(
    methods: Annotated[
        str,
        typer.Option(help="Separated by commas, e.g. none,nova:balanced,truncate:2.", autocompletion=complete.methods),
    ] = ("none,nova:balanced"),
    out: Out = Path("scenes"),
    lists: Lists = BOTH,
    quick: Quick = False,
    prompts: Prompts = None,
    seeds: Seeds = 2,
    batch: Batch = 1,
    reference: Reference = False,
    model: Model = None,
    weights: Weights = None,
    device: Device = None,
    dtype: Dtype = None,
    pixel_budget: PixelBudget = None,
    skip_bad: SkipBad = False,
    workers: WorkersKind = "local",
    address: Address = None,
    replicas: Replicas = None,
    resources: Resources = None,
    quiet: Quiet = False,
) -> None:
    """The six GenEval tasks, graded by the recognizer that comes with the package."""
    from nextscale.methods.naming import parse_methods
    from nextscale.research.analyze.runs import require_start
    from nextscale.research.evaluate import session
    from nextscale.research.evaluate.report import by_background

    placement = read_placement(workers, address, replicas, resources)
    asked, found = parse_methods(methods), read_lists(lists)
    with contextlib.ExitStack() as stack:
        stack.enter_context(session.at_work(out))
        pipe, hands = stack.enter_context(pipelines(placement, model, weights, device, dtype, progress_bar=False))
        bench = make_bench(pipe, hands, found, out, quick, prompts, seeds, batch, pixel_budget, skip_bad)
        asked = parse_methods(methods, bench.pipe.spec.name)
        require_start(bench.pipe, asked, **bench.size)
        cells = bench.run(asked, reference, False if quiet else None)
        rows = [row for report in by_background(bench.items, cells) for row in report.rows()]
        session.save(bench, asked, cells, rows)
    _print(rows, bench, "seconds", {})
    typer.echo(f"wrote {out}")


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(help="A named sweep (see the help of an unknown one) or a .json file.")],
    out: Out = Path("sweep"),
    cost: Annotated[str, typer.Option(help="The axis of cost: seconds, flops or tokens.")] = "seconds",
    so_far: Annotated[
        bool, typer.Option("--so-far", help="Compute nothing: the table of what is there of every method.")
    ] = False,
    against: Annotated[str, typer.Option(help="Curves to compare with at equal cost.")] = "truncate,fastvar",
    lists: Lists = BOTH,
    quick: Quick = False,
    prompts: Prompts = None,
    seeds: Seeds = 1,
    batch: Batch = 1,
    reference: Reference = False,
    model: Model = None,
    weights: Weights = None,
    device: Device = None,
    dtype: Dtype = None,
    pixel_budget: PixelBudget = None,
    skip_bad: SkipBad = False,
    workers: WorkersKind = "local",
    address: Address = None,
    replicas: Replicas = None,
    resources: Resources = None,
    quiet: Quiet = False,
) -> None:
    """Quality against cost of many settings: table, curve, Pareto set, gain over truncation at equal cost, presets."""
    from nextscale.research.analyze.runs import require_start
    from nextscale.research.analyze.style import require_matplotlib
    from nextscale.research.evaluate import session
    from nextscale.research.evaluate.curve import best, draw_curves
    from nextscale.research.evaluate.presets import presets, write_presets
    from nextscale.research.evaluate.report import COSTS, by_background
    from nextscale.research.evaluate.sweep import read_sweep

    if cost not in COSTS:
        raise NextscaleError(f"unknown cost {cost!r}; allowed: {', '.join(COSTS)}")
    placement = None if so_far else read_placement(workers, address, replicas, resources)
    require_matplotlib()
    plan, found = read_sweep(name), read_lists(lists)
    asked = plan.methods
    with contextlib.ExitStack() as stack:
        if not so_far:  # who computes nothing may look on while another process does
            stack.enter_context(session.at_work(out))
        pipe, hands = stack.enter_context(pipelines(placement, model, weights, device, dtype, progress_bar=False))
        bench = make_bench(pipe, hands, found, out, quick, prompts, seeds, batch, pixel_budget, skip_bad)
        if so_far:
            bench.items = bench.items[: bench.complete_items(asked, reference)]
            if not bench.items:
                raise NextscaleError(f"{out} holds no image that all methods have drawn yet")
        require_start(bench.pipe, asked, **bench.size)
        cells = bench.run(asked, reference, False if quiet else None)
        # A curve begins where nothing is left out.
        others = {c: ("none", *plan.curves[c]) for c in against.split(",") if c in plan.curves}
        rows = [row for report in by_background(bench.items, cells, cost) for row in report.rows(others)]
        session.save(bench, asked, cells, rows)
        qualities = ("scenes", "psnr", "perceptual") if bench.with_features else ("scenes", "psnr", "ssim")
        title = f"{bench.pipe.spec.name}, {len(bench.items)} images, {bench.device}"
        draw_curves(rows, plan.curves, out / "curve.png", cost, qualities, title)
        where = f"nextscale eval sweep {name} --lists {lists} --cost {cost}: {title}"
        faithful = {entry for curve in plan.faithful for entry in plan.curves[curve]}
        write_presets(out / "presets", presets(rows, asked, cost, bench.pipe.spec.name, where, faithful))
    _print(rows, bench, cost, others)
    for background in dict.fromkeys(row.background for row in rows):
        ours = best([row for row in rows if row.background == background], cost, "psnr")
        typer.echo(f"Pareto set in PSNR, {background} backgrounds: {', '.join(ours)}")
    typer.echo(f"wrote {out}")


def read_lists(text: str) -> list[Any]:
    from nextscale.research.evaluate.scenes import read_scene_prompts

    return read_scene_prompts(*(name.strip() for name in text.split(",")))


def make_bench(
    pipe: Any,
    workers: Any,
    scene_prompts: list[Any],
    out: Path,
    quick: bool,
    prompts: int | None,
    seeds: int,
    batch: int,
    pixel_budget: str | None,
    skip_bad: bool,
) -> Any:
    from nextscale.research.evaluate import session
    from nextscale.research.evaluate.bench import Bench, make_items
    from nextscale.research.evaluate.features import why_missing
    from nextscale.research.evaluate.scenes import first_per_task
    from nextscale.research.prompt_checks import bad_prompts, refuse

    per_task = prompts or (QUICK if quick else None)
    scene_prompts = scene_prompts if per_task is None else first_per_task(scene_prompts, per_task)
    if pipe.backbone.prompts == "label":
        raise NextscaleError(f"the scenes are asked for in words, but {pipe.spec.name} takes class labels")
    bad = bad_prompts(
        pipe,
        [
            (scene_prompt.prompt, f"the scenes, {scene_prompt.task}, {scene_prompt.prompt!r}")
            for scene_prompt in scene_prompts
        ],
    )
    refuse(bad, skip_bad, len(scene_prompts))
    left_out = {b.prompt for b in bad}
    scene_prompts = [scene_prompt for scene_prompt in scene_prompts if scene_prompt.prompt not in left_out]
    size = {} if pixel_budget is None else {"pixel_budget": pixel_budget}
    items = make_items(scene_prompts, 1 if quick else seeds)
    folder = out if workers is None else out.absolute()
    bench = Bench(pipe, items, batch, folder, why_missing() is None, size, bad, workers)
    session.open_folder(bench)
    return bench


def _print(rows: Any, bench: Any, cost: str, others: dict[str, Any]) -> None:
    from rich.table import Table

    from nextscale.research.evaluate import session

    def show(value: Any, digits: int, scale: float = 1.0) -> str:
        if value is None:
            return "–"
        return f"{value * scale:.{digits}f}" if isinstance(value, float) else f"{value:.{digits}f}"

    kernel = any(row.values["kernel"] is not None for row in rows)
    head = [
        "method",
        "background",
        "scenes (95 %)",
        "seconds",
        "speed",
        "tokens",
        "FLOPs",
        "PSNR",
        "SSIM",
        "perceptual",
    ]
    table = Table(*head, *(["Fréchet", "kernel"] if kernel else []), *[f"PSNR vs {c}" for c in others], box=None)
    order = list(dict.fromkeys(row.name for row in rows))
    for row in sorted(rows, key=lambda row: order.index(row.name)):
        v = row.values
        cells = [row.name, row.background, show(v["scenes"], 3), show(v["seconds"], 2), show(v.get("speed"), 2)]
        cells += [show(v["tokens"], 1, 100) + " %", show(v["flops"], 1, 100) + " %"]
        cells += [_mean(v[q], d) for q, d in (("psnr", 1), ("ssim", 4), ("perceptual", 3))]
        cells += [show(v["frechet"], 2), show(v["kernel"], 4)] if kernel else []
        cells += [show(row.against[c]["psnr"], 2) if c in row.against else "–" for c in others]
        table.add_row(*cells)
    console().print(table)
    where = f"{bench.device}, batch {bench.batch}, {bench.pipe.dtype}".replace("torch.", "")
    typer.echo(f"{len(bench.items)} images of {bench.pipe.spec.name} on {where}; speed = plain seconds / seconds")
    if bench.skipped:
        typer.echo(f"{len(bench.skipped)} prompts were skipped; {session.RESULTS} lists them")
    if not bench.with_features:
        typer.echo("no perceptual distance: pip install 'nextscale[eval]'")
    if weak := session.unreliable_tasks():
        typer.echo(f"the recognizer is not reliable in: {', '.join(weak)}")


def _mean(estimate: Any, digits: int) -> str:
    return "–" if estimate is None else f"{estimate.value:.{digits}f}"
