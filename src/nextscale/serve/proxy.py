"""What Ray's proxy itself says, in the form of OpenAI's API, and a limit on what it reads. Ray installs it where the
variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH has the value nextscale.serve.proxy:middlewares."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextscale.serve.errors import BUSY, INVALID, SERVER, ApiError, respond, retry_after
from nextscale.serve.limits import MAX_BODY, body_too_large

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
            return await self.app(scope, receive, send)
        answer = _Answer(scope, receive, send)
        try:
            await self.app(scope, answer.receive, answer.send)
        except Exception:
            if not answer.refused:  # else Ray was told that the client has gone
                raise


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
            await respond(body_too_large({"x-request-id": f"req_{uuid.uuid4().hex}"}))(*self.client)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.refused and not self.started:
            return
        if message["type"] == "http.response.start" and is_plain(message):
            self.plain = message
        elif self.plain is None:
            self.started = True
            await self.client[2](message)
        elif not message.get("more_body"):
            await respond(error_of(self.plain))(*self.client)


def is_plain(start: Message) -> bool:
    kind = Headers(raw=start["headers"]).get("content-type", "")
    return start["status"] in SAID and not kind.startswith("application/json")


def error_of(start: Message) -> ApiError:
    message, kind, code = SAID[start["status"]]
    given = Headers(raw=start["headers"])
    headers = {"x-request-id": given["x-request-id"]} if "x-request-id" in given else {}
    if start["status"] != 404:
        headers |= retry_after(float(given.get("retry-after", RETRY_SECONDS)))
    return ApiError(start["status"], message, kind, code, headers=headers)


def middlewares() -> list[Any]:
    return [Middleware(PlainErrors)]
