"""What a request may be: identified, authorized, of a limited size, and here in time. Plain ASGI, so that streams and
clients who leave stay visible."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextscale.io.arguments import short_repr
from nextscale.serve.errors import UNAUTHORIZED, ApiError, internal_error, respond

logger = logging.getLogger(__name__)

MAX_BODY = 2**20
BODY_SECONDS = 10.0
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class ClientGone(Exception):
    """Nobody waits for the answer."""


class RequestId:
    """Give every request an id, its response the header, and an exception that nobody caught an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = name
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientGone:
            return None
        except Exception as error:
            logger.error("request %s failed", name, exc_info=error)
            if started:
                raise  # the connection ends in the middle, which the client notices
            await respond(internal_error(name))(scope, receive, send_with_id)


class OwnHosts:
    """Refuse requests for names that are not this machine's own: a page of another site could have its name resolve to
    127.0.0.1 and then call a server that asks for no key."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host, app = Headers(scope=scope).get("host", ""), self.app
        if not is_own_host(host):
            message = f"requests for the host {short_repr(host)} are refused without an API key; see docs/serving.md"
            app = respond(ApiError(403, message, code="unknown_host"))
        await app(scope, receive, send)


def is_own_host(host: str) -> bool:
    """Whether the header `host` is an address or a name of this machine alone, with or without a port."""
    name = re.sub(r":\d*$", "", host).strip("[]").lower()
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def key_checker(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """Make the dependency of routes that need a key; without one they are open."""

    async def check_key(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
        if scheme.lower() != "bearer" or not same:
            what = "the API key is wrong" if given else "an API key is missing"
            message = f"{what}; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, UNAUTHORIZED, "invalid_api_key", headers={"www-authenticate": "Bearer"})

    return check_key


async def read_body(request: Request) -> bytes:
    """Read a JSON body, of limited length and in limited time. The server reads over what is left of a refused one."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        message = f"content-type must be application/json, not {short_repr(kind)}"
        raise ApiError(415, message, code="unsupported_media_type")
    try:
        return await asyncio.wait_for(_read(request), BODY_SECONDS)
    except asyncio.TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None


async def _read(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0")
    too_large = announced.isdecimal() and (len(announced) > 20 or int(announced) > MAX_BODY)
    body, more = bytearray(), True
    while more and not too_large:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more, too_large = message.get("more_body", False), len(body) > MAX_BODY
    if too_large:
        raise body_too_large()
    return bytes(body)


def body_too_large() -> ApiError:
    return ApiError(413, f"the body is too large; allowed: {MAX_BODY} bytes", code="body_too_large")
