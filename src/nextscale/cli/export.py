from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nextscale.cli.options import (
    Device,
    Dtype,
    Model,
    OneMethod,
    PixelBudget,
    Preset,
    Revision,
    Settings,
    SkipBad,
    Vae,
    Weights,
    method_of,
)
from nextscale.cli.workers import Address, Replicas, Resources, WorkersKind, pipelines, read_placement


def export(
    benchmark: Annotated[str, typer.Argument(help="geneval, dpg, mjhq, imagereward, hpsv2 or imagenet.")],
    out: Annotated[Path, typer.Option(help="The folder; its `images` gets the images, manifest.json lies beside.")],
    prompts: Annotated[
        Path | None, typer.Option(help="The official prompt file or folder; imagenet needs none.", show_default=False)
    ] = None,
    model: Model = None,
    weights: Weights = None,
    method: OneMethod = None,
    preset: Preset = None,
    set_: Settings = [],  # noqa: B006
    shard: Annotated[str, typer.Option(help="i/n: only the i-th of n parts, from 1.")] = "1/1",
    resume: Annotated[bool, typer.Option("--resume", help="Make what is missing in a folder begun before.")] = False,
    skip_bad: SkipBad = False,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 1,
    images: Annotated[int | None, typer.Option(min=1, help="Per prompt. Default: the official number.")] = None,
    seed: Annotated[int, typer.Option(help="The first; docs/benchmarks.md has the rule.")] = 0,
    guidance_scale: Annotated[float | None, typer.Option(help="Default: what the authors use.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: what the authors use.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 = off. Default: what the authors use.")] = None,
    top_p: Annotated[float | None, typer.Option(help="0 = off. Default: what the authors use.")] = None,
    smooth: Annotated[bool | None, typer.Option(help="Default: what the authors use.", show_default=False)] = None,
    pixel_budget: PixelBudget = None,
    vae: Vae = None,
    text_encoder: Annotated[str | None, typer.Option(help="T5 folder or hub repository.", show_default=False)] = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    workers: WorkersKind = "local",
    address: Address = None,
    replicas: Replicas = None,
    resources: Resources = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No bars, no summary.")] = False,
) -> None:
    """Write the images of a benchmark as its official scorer reads them."""
    from nextscale.research.export.folder import ExportFolder
    from nextscale.research.export.plan import ExportPlan, Shard
    from nextscale.research.export.run import export as run

    placement = read_placement(workers, address, replicas, resources)
    part = Shard.parse(shard)
    plan = ExportPlan.read(benchmark, prompts, images, seed, skip_bad)
    folder = ExportFolder(out, part)  # looked at before a model is loaded for nothing
    folder.require_unlocked()
    folder.check(plan, plan.settings(), resume)
    reduction = method_of(method, preset, set_)
    show = False if quiet else None
    files: dict[str, Any] = {"vae": vae, "text_encoder": text_encoder, "revision": revision, "progress_bar": show}
    with pipelines(placement, model, weights, device, dtype, **files) as (pipe, hands):
        reduction = method_of(method, preset, set_, pipe.spec.name, quiet)
        pipe.progress_bar = False  # one bar for all images, not one for each
        done = run(
            pipe,
            plan,
            out if hands is None else out.absolute(),
            method=reduction,
            shard=part,
            batch=batch,
            resume=resume,
            pixel_budget=pixel_budget,
            progress_bar=show,
            workers=hands,
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            smooth=smooth,
        )
    if quiet:
        return
    typer.echo(f"made {done.made} images; {done.manifest} says how")
    if hands is not None and done.made:
        typer.echo(f"{hands.replicas} workers, {done.made / done.seconds:.2f} images a second")
    if done.skipped:
        typer.echo(f"{done.skipped} prompts were skipped, so no score will be that of the whole benchmark")
    if done.missing:
        typer.echo(f"{done.missing} images of other shards are not here yet")
        return
    typer.echo("score them in a clone of the official repository (docs/benchmarks.md):")
    for line in done.commands:
        typer.echo(f"    {line}")
