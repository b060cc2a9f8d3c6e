"""A replica by itself: what it tells of the others, and when Ray is to replace it. No cluster is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from ray import serve

from nextscale.serve.ray import METRICS_SECONDS, Replica


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Counter("images", "Images.", registry=self.registry)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="mine"), deployment="d", app_name="a")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    return Replica()


def answer_with(monkeypatch: pytest.MonkeyPatch, others: Any) -> list[float]:
    """Have the others answer with something, or raise it; how long they get."""
    asked: list[float] = []

    async def results_async(timeout_s: float, return_exceptions: bool) -> Any:
        asked.append(timeout_s)
        if isinstance(others, Exception):
            raise others
        return others

    handle = SimpleNamespace(broadcast=lambda name: SimpleNamespace(results_async=results_async))
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *where: handle)
    return asked


async def get(replica: Replica, path: str, **scope: Any) -> str:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await replica.answer({"type": "http", "method": "GET", "path": path, "headers": [], **scope}, asyncio.sleep, send)
    return b"".join(message.get("body", b"") for message in sent).decode()


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_metrics_do_not_wait_for_a_replica_that_hangs(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    replica.ready.set()
    replica.current, replica.metrics = hello, Metrics()
    asked = answer_with(monkeypatch, TimeoutError())
    assert 'images_total{replica="mine"} 0.0' in asyncio.run(get(replica, "/metrics"))
    assert asked == [METRICS_SECONDS]
    answer_with(monkeypatch, [("one", "images_total 1.0\n"), RuntimeError("died"), ("two", "images_total 2.0\n")])
    for path, prefix in (("/metrics", ""), ("/images/metrics", "/images")):
        said = asyncio.run(get(replica, path, root_path=prefix))
        assert said == 'images_total{replica="one"} 1.0\nimages_total{replica="two"} 2.0\n'
    assert asyncio.run(get(replica, "/v1/metrics")) == "hello"


def test_ray_replaces_what_serves_nothing(replica: Replica) -> None:
    replica.check_health()
    replica.failure = "no weights lie at /here"
    with pytest.raises(RuntimeError, match="no weights lie at /here"):
        replica.check_health()
