from __future__ import annotations

import importlib.util
import re
from typing import Annotated

import typer

from nextscale.cli import complete
from nextscale.errors import NextscaleError, choices

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    model: Annotated[
        list[str],
        typer.Option(
            help="Name or path, repeatable; the first is the default. Without: the small one of the package.",
            show_default=False,
            autocompletion=complete.one_of(complete.MODELS),
        ),
    ] = [],  # noqa: B006
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    method: Annotated[
        str,
        typer.Option(
            help="Of requests that name none; auto: what was measured to be the best on the model.",
            autocompletion=complete.methods,
        ),
    ] = "auto",
    max_batch: Annotated[
        int | None, typer.Option(min=1, max=256, help="Images of a batch. Default: 8 on a GPU, else 1.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, max=100_000, help="Images that may wait.")] = 64,
    batch_wait_ms: Annotated[
        float, typer.Option(min=0, max=10_000, help="How long a batch that is not full waits for others.")
    ] = 5.0,
    api_key: Annotated[
        str | None,
        typer.Option(help="Asked of all who use /v1.", envvar="NEXTSCALE_API_KEY", show_default=False),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="eager, compiled or graphs. Default: graphs on a GPU, else eager.",
            show_default=False,
            autocompletion=complete.one_of(complete.RUNTIMES),
        ),
    ] = None,
    warm: Annotated[
        str | None,
        typer.Option(help="More sizes to warm up, as 512x512,640x384.", show_default=False),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Default: bfloat16 on a GPU, else float32.", autocompletion=complete.one_of(complete.DTYPES)),
    ] = None,
    quantize: Annotated[str | None, typer.Option(help="fp8: 8-bit weights and activations on a GPU.")] = None,
    grace: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds that accepted requests get when it is stopped.")
    ] = 30.0,
    cors_origin: Annotated[
        list[str],
        typer.Option(help="Site whose pages may call, as https://example.com; repeatable.", show_default=False),
    ] = [],  # noqa: B006
    replicas: Annotated[
        str | None,
        typer.Option(
            help="Copies of the model on this machine behind one address, by Ray Serve: a number, or auto.",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info (with every request), warning, error.")] = "warning",
) -> None:
    """Serve the OpenAI image API, and a page to play with (needs pip install 'nextscale[serve]')."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NextscaleError(f"nextscale serve needs {choices(missing)}: pip install 'nextscale[serve]'")
    from nextscale.io.arguments import read_choice
    from nextscale.serve.server import LEVELS, listen
    from nextscale.serve.setup import ServeOptions

    read_choice(log_level, "log level", LEVELS)
    copies = read_replicas(replicas)
    options = ServeOptions(
        model=tuple(model),
        method=method,
        max_batch=max_batch,
        max_queue=max_queue,
        batch_wait_ms=batch_wait_ms,
        api_key=api_key,
        runtime=runtime,
        warm=warm,
        device=device,
        dtype=dtype,
        quantize=quantize,
        cors_origin=tuple(cors_origin),
    )
    if copies is not None:
        from nextscale.serve.replicas import serve_replicas

        serve_replicas(options, copies, host, port, grace=grace, log_level=log_level, say=typer.echo)
        return
    from nextscale.methods.auto import AUTO, is_measured
    from nextscale.serve.app import create_app
    from nextscale.serve.engine import Engine
    from nextscale.serve.metrics import Metrics
    from nextscale.serve.server import is_loopback
    from nextscale.serve.server import serve as run

    options = options.resolved()
    taken = listen(host, port)
    models = options.load()
    for served in models:
        if method == AUTO and not is_measured(served.pipe.spec.name):
            typer.echo(
                f"{served.name}: no method was measured on it, so auto is {served.method}; none computes all tokens"
            )
    metrics = Metrics()
    engine = Engine(models, options.limits, metrics)
    own_hosts_only = api_key is None and is_loopback(taken)
    app = create_app(engine, metrics=metrics, api_key=api_key, cors_origins=cors_origin, own_hosts_only=own_hosts_only)
    engine.start()
    run(app, engine, taken, grace=grace, log_level=log_level, say=typer.echo)


def read_replicas(text: str | None) -> int | str | None:
    """Read how many copies of the engine to serve; None: one, in this process."""
    if text is None or text == "auto":
        found: int | str | None = text
    elif re.fullmatch("[1-9][0-9]{0,3}", text):
        found = int(text)
    else:
        raise NextscaleError(f"--replicas {text!r} is neither a number from 1 to 9999 nor auto")
    if found is not None:
        from nextscale.cluster.placement import require_ray

        require_ray("--replicas")
    return found
