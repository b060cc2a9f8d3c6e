"""The routes: the image API, what it offers, how it is, and the page."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from nextscale.methods import METHODS, Method
from nextscale.methods.naming import format_method
from nextscale.methods.package_data import stored_names
from nextscale.serve import protocol
from nextscale.serve.engine import Engine
from nextscale.serve.errors import ApiError, AsciiResponse, on_api_error, on_http_exception
from nextscale.serve.limits import OwnHosts, RequestId, key_checker, read_body
from nextscale.serve.metrics import CONTENT_TYPE, Metrics
from nextscale.serve.protocol import ImageRequest
from nextscale.serve.served_model import ServedModel
from nextscale.serve.stream import Answer, EventStream
from nextscale.version import __version__

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src 'self' blob: data:; style-src 'self'; "
    "script-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
ENCODERS = 8  # images that are fetched from the device and encoded at once
EXPOSED = ["x-request-id", "retry-after", "retry-after-ms"]


def create_app(
    engine: Engine,
    *,
    metrics: Metrics | None = None,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    own_hosts_only: bool = False,
) -> FastAPI:
    """Make the app around an engine, which somebody else starts and drains. `metrics` is what observes the engine;
    `own_hosts_only` is for servers that only this machine reaches and that ask for no key."""
    app = FastAPI(title="nextscale", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    if own_hosts_only:
        app.add_middleware(OwnHosts)
    app.add_middleware(RequestId)  # the last is the outermost
    if metrics is not None:
        metrics.watch(engine)
    guarded = [Depends(key_checker(api_key))]
    app.include_router(_images(engine, metrics), prefix="/v1", dependencies=guarded)
    app.include_router(_catalog(engine), prefix="/v1", dependencies=guarded)
    app.include_router(_status(engine, metrics))
    app.include_router(_page())
    return app


def _images(engine: Engine, metrics: Metrics | None) -> APIRouter:
    router, encoders = APIRouter(), anyio.CapacityLimiter(ENCODERS)
    schema = {"required": True, "content": {"application/json": {"schema": ImageRequest.model_json_schema()}}}

    @router.post("/images/generations", openapi_extra={"requestBody": schema}, response_class=AsciiResponse)
    async def generate_images(request: Request) -> Response:
        """Make images of a prompt; with "stream": true, server-sent events."""
        try:
            body = await read_body(request)
            asked = await to_thread.run_sync(protocol.read_request, body, engine.models, engine.default_model)
        except ApiError as error:
            if metrics is not None:
                metrics.rejected(error.code or "invalid")
            raise
        answer = Answer(request, asked, engine, encoders)
        await answer.submit()
        return EventStream(answer.stream()) if asked.stream else await answer.respond()

    return router


def _catalog(engine: Engine) -> APIRouter:
    router, created = APIRouter(), int(time.time())

    @router.get("/models")
    async def list_models() -> Response:
        """List the served models."""
        data = [_describe(model, created) for model in engine.models.values()]
        return AsciiResponse({"object": "list", "data": data})

    @router.get("/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        """Describe a model, and the words that it knows if it does not read any text."""
        if name not in engine.models:
            raise protocol.unknown_model(name, engine.models)
        content = _describe(engine.models[name], created)
        content["nextscale"]["vocabulary"] = engine.models[name].vocabulary
        return AsciiResponse(content)

    @router.get("/methods")
    async def list_methods(model: str | None = None) -> Response:
        """List the methods, and which quality chooses which."""
        if model is not None and model not in engine.models:
            raise protocol.unknown_model(model, engine.models)
        served = engine.default_model if model is None else engine.models[model]
        data = [
            {
                "id": cls.name,
                "summary": cls.summary,
                "paper": cls.paper,
                "presets": stored_names(cls.name),
                "fields": {f.name: _written(getattr(cls(), f.name)) for f in dataclasses.fields(cls)},
            }
            for cls in METHODS.values()
        ]
        return AsciiResponse({"object": "list", "data": data, "qualities": served.qualities, "default": served.method})

    return router


def _describe(model: ServedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "nextscale",
        "nextscale": {
            "family": model.pipe.spec.family,
            "sizes": [protocol.size_name(size) for size in model.sizes],
            "trained_sizes": [protocol.size_name(size) for size in model.trained_sizes],
            "default_size": protocol.size_name(model.default_size),
            "method": model.method,
            "scales": len(model.pipe.schedule()),
            "takes_labels": model.takes_labels,
        },
    }


def _written(value: Any) -> Any:
    return format_method(value) if isinstance(value, Method) else value


def _status(engine: Engine, metrics: Metrics | None) -> APIRouter:
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
    async def health() -> Response:
        state = engine.state
        return AsciiResponse({"status": state}, 200 if state == "ready" else 503, {"cache-control": "no-store"})

    if metrics is not None:

        @router.get("/metrics", include_in_schema=False)
        def exposition() -> Response:
            return Response(metrics.exposition(), media_type=CONTENT_TYPE)

    return router


def _page() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    def add(route: str, name: str, kind: str) -> None:
        @router.api_route(route, methods=["GET", "HEAD"])
        async def serve_file(request: Request) -> Response:
            content = (PAGE / name).read_bytes()
            headers = {**PAGE_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()}"'}
            if request.headers.get("if-none-match") == headers["etag"]:
                return Response(status_code=304, headers=headers)
            return Response(content, headers=headers, media_type=kind)

    for route, (name, kind) in PAGE_FILES.items():
        add(route, name, kind)
    return router
