"""The server on Ray Serve: one deployment, and in each of its replicas the engine and the app of `nextscale serve`.

serve run nextscale.serve.ray:app
serve build nextscale.serve.ray:app -o serve.yaml
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextscale.serve.changing import ChangingApp, path_of

NAME = "nextscale"  # of the deployment, and of the application that the command line starts
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
SPARE = 16  # requests of a replica besides those for images: health, metrics, the page
RETRY_AFTER = 5  # seconds, where Ray itself refuses
METRICS_SECONDS = 3.0  # for the other replicas to tell theirs
GRACE = 60.0  # seconds for accepted requests, when a replica ends


class Replica(ChangingApp):
    """`user_config` has the fields of `ServeOptions`; with another one the replica answers what it accepted, and then
    serves the new model."""

    def __init__(self) -> None:
        super().__init__()
        context = serve.get_replica_context()
        self.name, self.where = context.replica_id.unique_id, (context.deployment, context.app_name)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes no method for an app
            await self.answer(scope, receive, send)

        return answer

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Load the models of a config and warm them up. Until then the replica gets no requests."""
        await self.change(user_config)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
        elif self.current is not None and scope["type"] == "http" and path_of(scope) == "/metrics":
            await Response(await self._all_metrics(), media_type=EXPOSITION)(scope, receive, without_id(send))
        else:
            await self.respond(scope, receive, without_id(send))

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        if self.engine is not None and self.engine.state == "failed":
            raise RuntimeError(f"the engine has failed: {self.engine.failure}")

    def exposition(self) -> tuple[str, str]:
        """The replica's own metrics."""
        return self.name, "" if self.metrics is None else self.metrics.exposition().decode()

    async def _all_metrics(self) -> str:
        """The metrics of all replicas, whichever is asked; its own only, if another does not answer."""
        from nextscale.serve.metrics import merge

        answers = serve.get_deployment_handle(*self.where).broadcast("exposition")
        try:
            found = await answers.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        except TimeoutError:
            found = [self.exposition()]
        return merge(dict(answer for answer in found if not isinstance(answer, BaseException)))


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
