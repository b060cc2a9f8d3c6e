"""What Ray's proxy itself says or leaves out, in the form of OpenAI's API, and a limit on what it reads. Ray installs
it where the variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH has the value nextscale.serve.proxy:middlewares."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextscale.serve.errors import BUSY, INVALID, SERVER, ApiError, respond, retry_after
from nextscale.serve.limits import MAX_BODY, body_too_large
from nextscale.serve.stream import server_sent_error

logger = logging.getLogger("ray.serve")  # the log of Ray's proxy

PATH = "nextscale.serve.proxy:middlewares"
ROUTES = "/-/routes"  # where Ray says what it serves
VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
RETRY_SECONDS = 1.0  # where Ray does not say when
HEALTH_SECONDS = 2.0  # for a replica to say how it is; while all of them load, Ray would keep the question waiting
SAID = {  # by status: what Ray's plain text means to a client
    404: ("there is no such application", INVALID, "not_found"),
    408: ("the request took too long", SERVER, "request_timeout"),
    429: ("all replicas are busy", BUSY, "queue_full"),
    500: ("the replica that worked on the request has died; try again", SERVER, "replica_died"),
    503: ("no replica is ready; try again", SERVER, "unavailable"),
}
ABSENT = "no application is served here now; try again"
LOADING = "no replica is ready yet; try again"


class PlainErrors:
    """Answers of Ray's proxy are plain text; those of the app are JSON, and pass."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self.app(scope, receive, send)
            return
        answer = _Answer(self.app, scope, receive, send)
        await (answer.health() if scope["path"].endswith("/health") else answer.work())


class _Answer:
    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self.app, self.client = app, (scope, receive, send)
        self.plain: Message | None = None  # the start of an answer that is to be translated
        self.started = self.refused = False
        self.streams = False  # events, of which the last has not come
        self.read = 0  # bytes of the body

    async def work(self) -> None:
        """Have the answer made, and say what is missing where a replica died: then Ray says nothing."""
        try:
            await self.app(self.client[0], self.receive, self.send)
        except Exception:
            logger.exception("a request failed")
        died = error_of(500, Headers())
        if not self.started:
            await self.respond(died)
        elif self.streams:
            await self.send({"type": "http.response.body", "body": server_sent_error(died), "more_body": False})

    async def health(self) -> None:
        """The same for who asks whether anybody is ready: he is not to wait for it."""
        work = asyncio.ensure_future(self.work())
        await asyncio.wait({work}, timeout=HEALTH_SECONDS)
        if not self.started:
            await self.refuse(ApiError(503, LOADING, SERVER, "loading", headers=retry_after(RETRY_SECONDS)))
            work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def receive(self) -> Message:
        message: Message = {"type": "http.disconnect"} if self.refused else await self.client[1]()
        self.read += len(message.get("body", b""))
        if self.read <= MAX_BODY or self.refused:
            return message
        await self.refuse(body_too_large())  # Ray would read all of it, however long it is
        return {"type": "http.disconnect"}

    async def refuse(self, error: ApiError) -> None:
        """Answer instead of the app, and let it say nothing more."""
        self.refused = True
        if not self.started:
            await self.respond(error)

    async def respond(self, error: ApiError) -> None:
        self.started = True
        error.headers.setdefault("x-request-id", f"req_{uuid.uuid4().hex}")
        await respond(error)(*self.client)

    async def send(self, message: Message) -> None:
        if self.refused:
            return
        if message["type"] == "http.response.start" and is_plain(message):
            self.plain = message
        elif self.plain is None:
            self.started = True
            if message["type"] == "http.response.start":
                self.streams = kind_of(message).startswith("text/event-stream")
            elif not message.get("more_body"):
                self.streams = False
            await self.client[2](message)
        elif not message.get("more_body"):
            error = error_of(self.plain["status"], Headers(raw=self.plain["headers"]))
            if error.status == 404 and not await has_routes(self.app, self.client[0]):
                error = ApiError(503, ABSENT, SERVER, "unavailable", headers=error.headers | retry_after(RETRY_SECONDS))
            await self.respond(error)


async def has_routes(app: ASGIApp, scope: Scope) -> bool:
    """Ask Ray whether anything is served: an application at / leaves no path to be unknown, unless it is away."""
    said: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        said.append(message)

    path = scope.get("root_path", "") + ROUTES
    await app({**scope, "method": "GET", "path": path, "raw_path": path.encode(), "headers": []}, receive, send)
    table = b"".join(part.get("body", b"") for part in said[1:])
    return said[0]["status"] == 200 and table.strip() != b"{}"


def is_plain(start: Message) -> bool:
    return start["status"] in SAID and not kind_of(start).startswith("application/json")


def kind_of(start: Message) -> str:
    return Headers(raw=start["headers"]).get("content-type", "")


def error_of(status: int, given: Headers) -> ApiError:
    message, kind, code = SAID[status]
    headers = {"x-request-id": given["x-request-id"]} if "x-request-id" in given else {}
    if status != 404:
        headers |= retry_after(float(given.get("retry-after", RETRY_SECONDS)))
    return ApiError(status, message, kind, code, headers=headers)


def middlewares() -> list[Any]:
    return [Middleware(PlainErrors)]
