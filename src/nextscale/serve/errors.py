"""Whatever goes wrong, in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nextscale.errors import NextscaleError, readable
from nextscale.serve.jobs import Draining, NoMemory, QueueFull, ServeError

logger = logging.getLogger(__name__)

INVALID, UNAUTHORIZED = "invalid_request_error", "authentication_error"
BUSY, SERVER = "rate_limit_error", "server_error"
NO_RETRY = {"x-should-retry": "false"}  # here: the openai client would have the same work done twice more
REASONS = {"loading": "loading", "failed": "failed"}  # of a server that is not ready; any other state: shutting down


class ApiError(Exception):
    """An error as clients get it."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(readable(message))
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class AsciiResponse(Response):
    """JSON that any text survives, lone surrogates and control characters included."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_ascii(content)


def as_ascii(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def respond(error: ApiError) -> AsciiResponse:
    return AsciiResponse(error.body, error.status, error.headers)


def refusal(error: NextscaleError, state: str) -> ApiError:
    """What `Engine.submit` refused, or what a job failed with that is nobody's fault; `state` is the engine's."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), BUSY, "queue_full", headers=retry_after(error.retry_after))
    if isinstance(error, Draining):
        code = REASONS.get(state, "shutting_down")
        return ApiError(503, str(error), SERVER, code, headers=retry_after(error.retry_after))
    if isinstance(error, ServeError):
        code = "out_of_memory" if isinstance(error, NoMemory) else "unavailable"
        return ApiError(503, str(error), SERVER, code, headers=NO_RETRY if isinstance(error, NoMemory) else None)
    return ApiError(400, str(error), code="invalid_value", param=getattr(error, "param", None))


def failure(error: Exception, state: str, request_id: str) -> ApiError:
    """What a job failed with after it was accepted: a refusal, for a method may find only at work that it does not fit
    the schedule; or a fault of ours, whose details only the log has."""
    if isinstance(error, NextscaleError):
        return refusal(error, state)
    logger.error("request %s failed", request_id, exc_info=error)
    return internal_error(request_id)


def internal_error(request_id: str) -> ApiError:
    message = f"something went wrong inside the server; its log has the details under {request_id}"
    return ApiError(500, message, SERVER, "internal_error", headers=NO_RETRY)


def retry_after(seconds: float) -> dict[str, str]:
    milliseconds = max(1, math.ceil(1000 * seconds))
    return {"retry-after-ms": str(milliseconds), "retry-after": str(math.ceil(milliseconds / 1000))}


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return respond(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer for an unknown route or method."""
    assert isinstance(error, HTTPException)
    where = request.scope["path"]
    if error.status_code == 404:
        message, code = f"there is nothing at {where}", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message, code = f"{request.method} is not for {where}; allowed: {allowed}", "method_not_allowed"
    else:
        message, code = str(error.detail), "bad_request"
    return respond(ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})))
