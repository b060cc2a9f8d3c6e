"""The server on Ray Serve: one deployment, and in each of its replicas the engine and the app of `nextscale serve`.

serve run nextscale.serve.ray:app
serve build nextscale.serve.ray:app -o serve.yaml
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = "nextscale"  # of the deployment, and of the application that the command line starts
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
SPARE = 16  # requests of a replica besides those for images: health, metrics, the page
RETRY_AFTER = 5  # seconds, where Ray itself refuses
LEAVE_SECONDS = 300.0  # for accepted requests, when a replica gets another model
GRACE = 60.0  # the same, when a replica ends


class Replica:
    """An engine that owns its device, and the app around it. `user_config` has the fields of `ServeOptions`; with
    another one the replica answers what it accepted, and then serves the new model."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self.name, self.where = context.replica_id.unique_id, (context.deployment, context.app_name)
        self.ready, self.empty, self.requests = asyncio.Event(), asyncio.Event(), 0
        self.current: ASGIApp | None = None
        self.engine: Any = None
        self.metrics: Any = None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def respond(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes no method for an app
            await self.respond(scope, receive, send)

        return respond

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Load the models of a config and warm them up. Until then the replica gets no requests."""
        from nextscale.serve.setup import ServeOptions

        options = ServeOptions.read(user_config)
        if options.api_key is None:
            options = dataclasses.replace(options, api_key=os.environ.get("NEXTSCALE_API_KEY"))
        options = await asyncio.to_thread(options.resolved)
        self.ready.clear()
        await self._leave()
        self.engine, self.current, self.metrics = await asyncio.to_thread(start, options)
        self.ready.set()

    async def _leave(self) -> None:
        """Answer what was accepted, and let go of the model, for the next may need its memory."""
        self.empty.clear()
        if self.requests:
            with_limit = asyncio.wait_for(self.empty.wait(), LEAVE_SECONDS)
            await asyncio.gather(with_limit, return_exceptions=True)
        if self.engine is not None:
            await asyncio.to_thread(self.engine.drain, 0.0)
        self.engine = self.current = self.metrics = None

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the app; those that come while the model changes wait for the new one."""
        if scope["type"] == "lifespan":
            return await live(receive, send)
        while not self.ready.is_set():
            await self.ready.wait()
        assert self.current is not None
        self.requests += 1
        try:
            asks_all = scope["type"] == "http" and scope["path"] == "/metrics"
            app = Response(await self._all_metrics(), media_type=EXPOSITION) if asks_all else self.current
            await app(scope, receive, without_id(send))
        finally:
            self.requests -= 1
            if not self.requests:
                self.empty.set()

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if self.engine is not None and self.engine.state == "failed":
            raise RuntimeError(f"the engine has failed: {self.engine.failure}")

    def exposition(self) -> tuple[str, str]:
        """The replica's own metrics."""
        return self.name, "" if self.metrics is None else self.metrics.exposition().decode()

    async def _all_metrics(self) -> str:
        """The metrics of all replicas, whichever is asked."""
        from nextscale.serve.metrics import merge

        answers = serve.get_deployment_handle(*self.where).broadcast("exposition")
        found = await answers.results_async(return_exceptions=True)
        return merge(dict(answer for answer in found if not isinstance(answer, Exception)))


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


def without_id(send: Send) -> Send:
    """Leave out the request's id: Ray's proxy, whose id it is, adds it again."""

    async def send_without(message: Message) -> None:
        if message["type"] == "http.response.start":
            del MutableHeaders(scope=message)["x-request-id"]
        await send(message)

    return send_without


async def live(receive: Receive, send: Send) -> None:
    """Nothing starts or ends with the app: its engine comes and goes with the config."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def ongoing(max_queue: int, max_batch: int) -> int:
    """Requests that a replica may have at once: so many that its own queue is full before, and it says so itself."""
    return max_queue + max_batch + SPARE


deployment = serve.deployment(
    name=NAME,
    num_replicas=1,
    max_ongoing_requests=ongoing(64, 8),
    max_queued_requests=64,
    backpressure_config={"status_code": 429, "retry_after_s": RETRY_AFTER},
    graceful_shutdown_timeout_s=GRACE,
    user_config={},
)(serve.ingress()(Replica))
app = deployment.bind()
