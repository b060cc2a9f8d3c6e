"""What Ray's proxy itself says, in the form of OpenAI's API, and a limit on what it reads. Ray installs it where the
variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH has the value nextscale.serve.proxy:middlewares."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextscale.serve.errors import BUSY, INVALID, SERVER, ApiError, respond, retry_after
from nextscale.serve.limits import MAX_BODY, body_too_large

logger = logging.getLogger("ray.serve")  # the log of Ray's proxy

PATH = "nextscale.serve.proxy:middlewares"
VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
RETRY_SECONDS = 1.0  # where Ray does not say when
SAID = {  # by status: what Ray's plain text means to a client
    404: ("there is no such application", INVALID, "not_found"),
    408: ("the request took too long", SERVER, "request_timeout"),
    429: ("all replicas are busy", BUSY, "queue_full"),
    500: ("the replica that worked on the request has died; try again", SERVER, "replica_died"),
    503: ("no replica is ready; try again", SERVER, "unavailable"),
}


class PlainErrors:
    """Answers of Ray's proxy are plain text; those of the app are JSON, and pass."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self.app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send)
        try:
            await self.app(scope, answer.receive, answer.send)
        except Exception:
            logger.exception("a request failed")
        if not answer.started:  # Ray says nothing where a replica died
            await answer.respond(error_of(500, Headers()))


class _Answer:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.client = scope, receive, send
        self.plain: Message | None = None  # the start of an answer that is to be translated
        self.started = self.refused = False
        self.read = 0  # bytes of the body

    async def receive(self) -> Message:
        message: Message = {"type": "http.disconnect"} if self.refused else await self.client[1]()
        self.read += len(message.get("body", b""))
        if self.read <= MAX_BODY or self.refused:
            return message
        self.refused = True  # Ray would read all of it, however long it is
        if not self.started:
            await self.respond(body_too_large())
        return {"type": "http.disconnect"}

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
            await self.client[2](message)
        elif not message.get("more_body"):
            await self.respond(error_of(self.plain["status"], Headers(raw=self.plain["headers"])))


def is_plain(start: Message) -> bool:
    kind = Headers(raw=start["headers"]).get("content-type", "")
    return start["status"] in SAID and not kind.startswith("application/json")


def error_of(status: int, given: Headers) -> ApiError:
    message, kind, code = SAID[status]
    headers = {"x-request-id": given["x-request-id"]} if "x-request-id" in given else {}
    if status != 404:
        headers |= retry_after(float(given.get("retry-after", RETRY_SECONDS)))
    return ApiError(status, message, kind, code, headers=headers)


def middlewares() -> list[Any]:
    return [Middleware(PlainErrors)]
