"""Options of commands whose work several processes can share, and the pipelines that do it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nextscale.cli.options import default_device, default_dtype, load_pipeline, source_of
from nextscale.errors import NextscaleError

if TYPE_CHECKING:
    from nextscale.cluster.placement import Placement
    from nextscale.cluster.workers import Workers
    from nextscale.pipeline import Pipeline

WorkersKind = Annotated[
    str, typer.Option("--workers", help="ray: processes with a model each, on this machine or many (docs/cluster.md).")
]
Address = Annotated[
    str | None,
    typer.Option(help="Of a Ray cluster: auto, or HOST:PORT. Default: one on this machine.", show_default=False),
]
Replicas = Annotated[
    int | None, typer.Option(min=1, max=100_000, help="Workers. Default: all there is room for.", show_default=False)
]
Resources = Annotated[
    str | None,
    typer.Option(help="What each worker takes, as CPU=4; besides, GPU=1, or CPU=1 without GPUs.", show_default=False),
]


def read_placement(workers: str, address: str | None, replicas: int | None, resources: str | None) -> Placement | None:
    """Read where workers run; None: in this process."""
    if workers not in ("local", "ray"):
        raise NextscaleError(f"unknown workers {workers!r}; allowed: local, ray")
    if workers == "local":
        if (address, replicas, resources) != (None, None, None):
            raise NextscaleError("--address, --replicas and --resources need --workers ray")
        return None
    from nextscale.cluster.placement import Placement

    return Placement.read(address, replicas, resources)


@contextlib.contextmanager
def pipelines(
    placement: Placement | None,
    model: str | None,
    weights: str | None,
    device: str | None,
    dtype: str | None = None,
    passes: bool = False,
    **options: Any,
) -> Iterator[tuple[Pipeline, Workers | None]]:
    """Load the pipeline, and what does its work if this process does not. `passes`: the work has several passes."""
    if placement is None:
        yield load_pipeline(model, weights, device, dtype, **options), None
        return
    from nextscale.cluster.ray_workers import RayActorWorkers, RayDataWorkers, connected
    from nextscale.pipeline import Pipeline

    source = absolute(source_of(model, weights))
    options = {name: absolute(value) for name, value in options.items()}
    with connected(placement.address) as nodes:
        needs = placement.needs(device, nodes)
        replicas = placement.room(needs, nodes)
        device = device or ("cuda" if needs.get("GPU") else default_device())
        options |= {"model": model, "dtype": dtype or default_dtype(device)}
        # Here it is asked for settings only: the GPUs belong to the workers.
        pipe = Pipeline.from_pretrained(source, device="cpu", **options)
        load = functools.partial(Pipeline.from_pretrained, source, device=device, **options)
        yield pipe, (RayActorWorkers if passes else RayDataWorkers)(load, replicas, needs, device.partition(":")[0])


def absolute(value: Any) -> Any:
    """Make a path that is there absolute: workers have another working directory."""
    return str(Path(value).absolute()) if isinstance(value, (str, Path)) and Path(value).exists() else value
