"""What Ray's proxy says, translated; Ray itself is not needed for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")

from starlette.datastructures import Headers

from nextscale.serve.limits import MAX_BODY
from nextscale.serve.metrics import merge
from nextscale.serve.proxy import PlainErrors, middlewares

TEXT = [(b"content-type", b"text/plain"), (b"x-request-id", b"mine")]
JSON = [(b"content-type", b"application/json")]


def answer(
    app: Callable[..., Awaitable[None]], body: tuple[bytes, ...] = (b"",), path: str = "/v1/images/generations"
) -> tuple[int, Headers, bytes]:
    """What a client gets of an app behind the filter."""
    left = [{"type": "http.request", "body": part, "more_body": n + 1 < len(body)} for n, part in enumerate(body)]
    sent: list[Any] = []

    async def receive() -> Any:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": "POST", "headers": []}
    asyncio.run(PlainErrors(app)(scope, receive, send))
    return sent[0]["status"], Headers(raw=sent[0]["headers"]), b"".join(part["body"] for part in sent[1:])


def says(status: int, headers: list[tuple[bytes, bytes]], *parts: bytes) -> Callable[..., Awaitable[None]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for n, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": n + 1 < len(parts)})

    return app


@pytest.mark.parametrize(
    ("status", "code", "hint"),
    [
        (429, "queue_full", "7000"),
        (500, "replica_died", "1000"),
        (503, "unavailable", "1000"),
    ],
)
def test_plain_errors_get_the_form(status: int, code: str, hint: str | None) -> None:
    headers = [*TEXT, (b"retry-after", b"7")] if status == 429 else TEXT
    got, given, body = answer(says(status, headers, b"Request ", b"dropped"))
    assert got == status
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert given.get("retry-after-ms") == hint
    assert given["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("table", "status", "code"),
    [
        (says(200, JSON, b'{"/other":', b'"other"}'), 404, "not_found"),
        (says(200, JSON, b"{}"), 503, "unavailable"),
        (says(503, TEXT, b"no route table yet"), 503, "unavailable"),
    ],
)
def test_an_application_that_is_away_may_come_back(table: Any, status: int, code: str) -> None:
    """Ray says 404 before an application is there, and while it is deployed anew."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (table if scope["path"] == "/-/routes" else says(404, TEXT, b"Path not found"))(scope, receive, send)

    got, headers, body = answer(app)
    assert (got, json.loads(body)["error"]["code"]) == (status, code)
    assert headers.get("retry-after-ms") == (None if status == 404 else "1000")
    assert headers["x-request-id"] == "mine"


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    """Ray sends nothing more when a replica dies, and the client would take that for the end."""
    event = b'event: image_generation.partial_image\ndata: {"type": "image_generation.partial_image"}\n\n'

    async def dies(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": event, "more_body": True})

    status, _, body = answer(dies)
    assert status == 200
    assert body.startswith(event + b"event: error\ndata: ")
    assert body.endswith(b"\n\n")
    error = json.loads(body.rpartition(b"data: ")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "replica_died"
    whole = says(200, [(b"content-type", b"text/event-stream; charset=utf-8")], event, b"")
    assert answer(whole)[2] == event, "one that ends well gets nothing more"


def test_health_is_answered_while_nobody_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.serve.proxy.HEALTH_SECONDS", 0.05)

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:  # as Ray's proxy does
            await says(503, TEXT, b"cancelled")(scope, receive, send)

    status, headers, body = answer(waits, path="/health")
    assert (status, json.loads(body)["error"]["code"]) == (503, "loading")
    assert headers["retry-after-ms"] == "1000"
    assert answer(says(200, JSON, b'{"status":"ready"}'), path="/health")[::2] == (200, b'{"status":"ready"}')


def test_answers_of_the_app_pass() -> None:
    for status, headers in ((429, JSON), (200, TEXT), (401, TEXT)):
        assert answer(says(status, headers, b"a", b"b"))[::2] == (status, b"ab")
    assert answer(says(503, TEXT, b"draining"), path="/-/healthz")[::2] == (503, b"draining")


def test_silence_and_faults_become_an_error_that_can_be_tried_again() -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None: ...

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a secret of the server")

    for app in (silent, broken):
        status, headers, body = answer(app)
        assert status == 500
        assert headers["x-request-id"].startswith("req_")
        assert headers["retry-after-ms"] == "1000"
        assert b"secret" not in body


def test_a_body_without_end_is_cut_off() -> None:
    read = []

    async def greedy(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            read.append(len(message["body"]))
        await says(200, JSON, b"late")(scope, receive, send)

    status, headers, body = answer(greedy, (b"x" * 2**16,) * 100)
    assert status == 413
    assert json.loads(body)["error"]["code"] == "body_too_large"
    assert sum(read) <= MAX_BODY
    assert headers["x-request-id"]
    assert answer(greedy, (b"x" * 2**16,) * 4)[::2] == (200, b"late")
    assert [m.cls for m in middlewares()] == [PlainErrors]


def test_metrics_of_replicas_in_one_text() -> None:
    one = '# HELP a Things.\n# TYPE a counter\na_total{model="x"} 1.0\n# HELP b Seconds.\n# TYPE b gauge\nb 2.5\n'
    assert merge({"r2": one.replace("1.0", "3.0"), "r1": one}) == (
        '# HELP a Things.\n# TYPE a counter\na_total{replica="r1",model="x"} 1.0\na_total{replica="r2",model="x"} 3.0\n'
        '# HELP b Seconds.\n# TYPE b gauge\nb{replica="r1"} 2.5\nb{replica="r2"} 2.5\n'
    )
