from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Annotated

import typer

from nextscale.cli import complete
from nextscale.cli.options import default_device, default_dtype, source_of
from nextscale.errors import NextscaleError, choices

if TYPE_CHECKING:
    from nextscale.serve.served_model import ServedModel, Size

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
ON_GPU = 8  # images of a batch; on a CPU a larger batch gains nothing


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
            help="Of requests that name none; auto: the preset measured on the model.",
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
    log_level: Annotated[str, typer.Option(help="debug, info (with every request), warning, error.")] = "warning",
) -> None:
    """Serve the OpenAI image API, and a page to play with (needs pip install 'nextscale[serve]')."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NextscaleError(f"nextscale serve needs {choices(missing)}: pip install 'nextscale[serve]'")
    from nextscale.io.arguments import read_choice
    from nextscale.io.devices import as_device, as_dtype
    from nextscale.methods.naming import PLAIN, parse_method
    from nextscale.models.fp8 import check_quantize
    from nextscale.runtime.registry import check_runtime
    from nextscale.serve.app import create_app
    from nextscale.serve.engine import Engine, Limits
    from nextscale.serve.metrics import Metrics
    from nextscale.serve.served_model import AUTO, ServedModel
    from nextscale.serve.server import LEVELS, listen
    from nextscale.serve.server import serve as run

    read_choice(log_level, "log level", LEVELS)
    if method != AUTO:
        parse_method(method)
    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise NextscaleError("the API key must be letters, digits and signs of ASCII, without spaces")
    origins, sizes = [read_origin(text) for text in cors_origin], read_sizes(warm)
    device = device or default_device()
    on_gpu = as_device(device).type == "cuda"
    dtype, runtime = dtype or default_dtype(device), runtime or ("graphs" if on_gpu else "eager")
    as_dtype(dtype)
    check_runtime(runtime)
    check_quantize(quantize, as_device(device))
    sources = find_models(model)
    taken = listen(host, port)
    models = [
        ServedModel.load(source, method=method, device=device, dtype=dtype, runtime=runtime, quantize=quantize)
        for source in sources
    ]
    add_warm_sizes(models, sizes)
    for served in models:
        if method == AUTO and served.method == PLAIN:
            typer.echo(f"{served.name}: no preset was measured on it, so all tokens are computed; --method chooses one")
    limits = Limits(
        max_batch=max_batch or (ON_GPU if on_gpu else 1), max_queue=max_queue, batch_wait=batch_wait_ms / 1000
    )
    metrics = Metrics()
    engine = Engine(models, limits, metrics)
    app = create_app(engine, metrics=metrics, api_key=api_key, cors_origins=origins)
    engine.start()
    run(app, engine, taken, grace=grace, log_level=log_level, say=typer.echo)


def find_models(asked: list[str]) -> list[str]:
    """Names and paths of models that are there and can be told apart; nothing is loaded yet."""
    from nextscale.checkpoints import locate, pretrained

    sources = asked or [source_of(None, None)]
    names: dict[str, str] = {}
    for source in sources:
        name = pretrained.read(locate.locate(source, None, None, locate.Hub())).spec.name
        if name in names:
            raise NextscaleError(f"--model {names[name]!r} and {source!r} are both named {name}; serve one of them")
        names[name] = source
    return sources


def read_sizes(text: str | None) -> list[Size]:
    """Read WIDTHxHEIGHT,..."""
    sizes = []
    for part in () if text is None else text.split(","):
        size = re.fullmatch(r"\s*([1-9]\d{1,4})x([1-9]\d{1,4})\s*", part, re.ASCII)
        if size is None:
            raise NextscaleError(f"--warm {text!r} is not a list of sizes such as 512x512,640x384")
        sizes.append((int(size[1]), int(size[2])))
    return sizes


def add_warm_sizes(models: list[ServedModel], sizes: list[Size]) -> None:
    """Tell every model which of the sizes it is to be warm for."""
    for width, height in sizes:
        able = [model for model in models if (width, height) in model.sizes]
        if not able:
            allowed = choices(dict.fromkeys(f"{w}x{h}" for model in models for w, h in model.sizes))
            raise NextscaleError(f"--warm {width}x{height} is not a size of the model; allowed: {allowed}")
        for model in able:
            if (width, height) not in model.warm_sizes:
                model.warm_sizes.append((width, height))


def read_origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"https?://[^/\s,?#]+", text):
        raise NextscaleError(f"--cors-origin {text!r} is not an origin such as https://example.com, nor '*'")
    return text
