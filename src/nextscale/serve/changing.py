"""An app whose models change while it is served: requests that were accepted are answered, those that come wait."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from nextscale.errors import NextscaleError
from nextscale.serve.errors import SERVER, ApiError, AsciiResponse, respond, retry_after

LEAVE_SECONDS = 300.0  # for accepted requests, when another model is to come
RETRY_SECONDS = 5.0  # until another replica may have taken the place of one that failed


class ChangingApp:
    """An engine that owns its device, and the app around it."""

    def __init__(self) -> None:
        self.ready, self.empty, self.requests = asyncio.Event(), asyncio.Event(), 0
        self.options: Any = None  # that are served
        self.current: ASGIApp | None = None
        self.engine: Any = None
        self.metrics: Any = None
        self.failure: str | None = None  # why nothing is served

    async def change(self, config: Mapping[str, Any]) -> None:
        """Load the models of a config, which has the fields of `ServeOptions`, and warm them up. A config that cannot
        be read changes nothing; after any other failure nothing is served."""
        from nextscale.serve.setup import ServeOptions

        try:
            options = ServeOptions.read(config)
            if options.api_key is None:
                options = dataclasses.replace(options, api_key=os.environ.get("NEXTSCALE_API_KEY"))
            options = await asyncio.to_thread(options.resolved)
            if options == self.options:  # Ray asks again when it numbers its replicas anew
                return
            self.ready.clear()
            await self._leave()
            self.engine, self.current, self.metrics = await asyncio.to_thread(start, options)
            self.options, self.failure = options, None
        except BaseException as error:
            if self.current is None:
                known = isinstance(error, NextscaleError)
                self.failure = str(error) if known else "the model could not be loaded; the log has the details"
            raise
        finally:
            self.ready.set()  # or those that wait would wait for ever

    async def _leave(self) -> None:
        """Answer what was accepted, and let go of the models, for the next may need their memory."""
        self.empty.clear()
        if self.requests:
            with_limit = asyncio.wait_for(self.empty.wait(), LEAVE_SECONDS)
            await asyncio.gather(with_limit, return_exceptions=True)
        engine, self.engine, self.current, self.metrics, self.options = self.engine, None, None, None, None
        if engine is not None:
            await asyncio.to_thread(engine.drain, 0.0)
            release(engine)

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; nobody waits to hear that the models change, or why there are none."""
        if not self.ready.is_set() and scope["type"] == "http" and path_of(scope) == "/health":
            loading = AsciiResponse({"status": "loading"}, 503, {"cache-control": "no-store"})
            return await loading(scope, receive, send)
        while not self.ready.is_set():
            await self.ready.wait()
        if self.current is None:
            return await respond(unavailable(self.failure or "nothing is served yet"))(scope, receive, send)
        self.requests += 1
        try:
            await self.current(scope, receive, send)
        finally:
            self.requests -= 1
            if not self.requests:
                self.empty.set()


def start(options: Any) -> tuple[Any, Any, Any]:
    """Load, warm up and wrap the models of resolved options."""
    from nextscale.serve.app import create_app
    from nextscale.serve.engine import Engine
    from nextscale.serve.metrics import Metrics

    metrics = Metrics()
    engine = Engine(options.load(), options.limits, metrics)
    engine.start(wait=True)
    made = create_app(engine, metrics=metrics, api_key=options.api_key, cors_origins=options.cors_origin)
    return engine, made, metrics


def release(engine: Any) -> None:
    """Drop the models of an engine that has stopped. FastAPI remembers the functions of routes, and these the engine,
    for longer than anybody serves it."""
    engine.models.clear()
    del engine.default_model
    gc.collect()


def path_of(scope: Scope) -> str:
    """The path within the app, whatever prefix it is served under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def unavailable(why: str) -> ApiError:
    return ApiError(503, why, SERVER, "unavailable", headers=retry_after(RETRY_SECONDS))
