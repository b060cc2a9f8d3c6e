"""An app whose models change: what Ray does to a replica, without Ray."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")

from nextscale.errors import NextscaleError
from nextscale.serve import changing
from nextscale.serve.app import create_app
from nextscale.serve.changing import ChangingApp, path_of, release
from nextscale.serve.engine import Engine
from nextscale.serve.metrics import Metrics
from nextscale.serve.served_model import ServedModel
from nextscale.testing import tiny_var

CONFIG = {"method": "none", "device": "cpu"}


class Stub:
    """An engine that is not at work."""

    def __init__(self) -> None:
        self.models, self.default_model, self.drained = {"a": object()}, object(), False

    def drain(self, timeout: float) -> bool:
        self.drained = True
        return True


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def get(app: ChangingApp, path: str = "/v1/models", **scope: Any) -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app.respond({"type": "http", "method": "GET", "path": path, "headers": [], **scope}, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, sent[1]["body"]


def test_the_models_of_an_engine_that_has_left_are_freed() -> None:
    """FastAPI remembers the functions of routes, and the next model may need the memory."""

    def serve_once() -> Any:
        model, metrics = ServedModel(tiny_var()), Metrics()
        engine = Engine([model], observer=metrics)
        engine.start(wait=True)
        app = create_app(engine, metrics=metrics)
        sent: list[Any] = []

        async def ask() -> None:
            async def send(message: Any) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [], "query_string": b""}
            await app(scope, asyncio.sleep, send)

        asyncio.run(ask())
        assert sent[0]["status"] == 200
        assert engine.drain(10)
        release(engine)
        return weakref.ref(model.pipe)

    pipe = serve_once()
    gc.collect()
    assert pipe() is None


def test_requests_wait_for_a_model_and_health_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        app, may_start = ChangingApp(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def start(options: Any) -> Any:
            asyncio.run_coroutine_threadsafe(may_start.wait(), loop).result(30)
            return Stub(), hello, None

        monkeypatch.setattr(changing, "start", start)
        changes = asyncio.create_task(app.change(CONFIG))
        asked = asyncio.create_task(get(app))
        await asyncio.sleep(0.05)
        for prefix in ("", "/images"):
            status, _, body = await get(app, f"{prefix}/health", root_path=prefix)
            assert (status, json.loads(body)) == (503, {"status": "loading"})
        assert not asked.done()
        may_start.set()
        await changes
        assert (await asked)[::2] == (200, b"hello")
        first = app.engine
        await app.change(CONFIG)
        assert app.engine is first, "nothing is loaded again for the same config"
        await app.change({**CONFIG, "max_queue": 3})
        assert first.drained
        assert not first.models
        assert app.engine is not first

    asyncio.run(check())


def test_a_model_that_cannot_be_loaded_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        app = ChangingApp()
        monkeypatch.setattr(changing, "start", lambda options: (Stub(), hello, None))
        await app.change(CONFIG)
        with pytest.raises(NextscaleError, match="unknown method"):
            await app.change({**CONFIG, "method": "nothing"})
        assert (await get(app))[0] == 200, "a config that cannot be read changes nothing"

        def broken(options: Any) -> Any:
            raise NextscaleError("no weights lie at /here")

        monkeypatch.setattr(changing, "start", broken)
        with pytest.raises(NextscaleError, match="no weights"):
            await app.change({**CONFIG, "max_queue": 3})
        status, headers, body = await get(app)
        error = json.loads(body)["error"]
        assert (status, error["message"], error["code"]) == (503, "no weights lie at /here", "unavailable")
        assert int(headers["retry-after"]) >= 1
        assert (await get(app, "/health"))[0] == 503
        monkeypatch.setattr(changing, "start", lambda options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await app.change({**CONFIG, "max_queue": 4})
        assert b"zero" not in (await get(app))[2]
        monkeypatch.setattr(changing, "start", lambda options: (Stub(), hello, None))
        await app.change({**CONFIG, "max_queue": 3})
        assert (await get(app))[0] == 200
        assert app.failure is None

    asyncio.run(check())


def test_the_path_within_a_prefix() -> None:
    assert path_of({"path": "/metrics"}) == path_of({"path": "/images/metrics", "root_path": "/images"}) == "/metrics"
