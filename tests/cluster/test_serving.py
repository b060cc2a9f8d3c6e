"""Replicas behind Ray's proxy, asked by the `openai` client: they must look like one server."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from openai import APIError, APIStatusError, AuthenticationError, BadRequestError, OpenAI, RateLimitError
from processes import descendants, titled, wait_for
from ray import serve

from nextscale.serve import proxy
from nextscale.serve.ray import NAME, deployment

KEY = "a-key"
CONFIG = {"model": "clipart", "method": "truncate:5", "api_key": KEY}  # half a second for an image of 512 x 512
SMALL = {"size": "256x256", "extra_body": {"seed": 7}}


def replicas() -> list[int]:
    """Processes of our own replicas, whatever else the machine serves."""
    ours = descendants(os.getpid())
    return [pid for pid in titled("ray::ServeReplica") if pid in ours]


def deploy(**options: Any) -> None:
    options = {"num_replicas": 2, "user_config": CONFIG, "health_check_period_s": 1, **options}
    serve.run(deployment.options(**options).bind(), name=NAME, route_prefix="/")


def require_to_come_back(url: str) -> None:
    answer = httpx.get(f"{url}/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after-ms"]) > 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray.shutdown()
    os.environ[proxy.VARIABLE] = proxy.PATH
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    url = f"http://127.0.0.1:{port}"
    require_to_come_back(url)  # nothing is deployed yet
    deploy()
    yield url
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def client(url: str) -> OpenAI:
    """It tries nothing again."""
    return OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def draw(client: OpenAI, **options: Any) -> Any:
    return client.images.generate(prompt="a red fox", **{**SMALL, **options})


def counts(url: str, name: str) -> dict[str, float]:
    """A metric of every replica."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return {m[1]: float(m[2]) for m in re.finditer(rf'^{name}{{replica="(\w+)".*}} (\S+)$', text, re.MULTILINE)}


class Load:
    """Clients that ask one request after another until the end."""

    def __init__(self, client: OpenAI, clients: int = 3) -> None:
        self.client, self.ended, self.answers = client, threading.Event(), list[Any]()
        self.threads = [threading.Thread(target=self.ask, daemon=True) for _ in range(clients)]

    def ask(self) -> None:
        while not self.ended.is_set():
            try:
                self.answers.append(draw(self.client).nextscale["method"])
            except Exception as error:
                self.answers.append(error)

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        assert wait_for(lambda: len(self.answers) >= 4)
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(60)


def test_replicas_answer_alike(client: OpenAI, url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: draw(client).data[0].b64_json, range(6)))
    assert len(set(answers)) == 1
    made = counts(url, "nextscale_images_finished_total")
    assert sum(made.values()) == 6
    assert len(made) == 2, "both took part"
    assert counts(url, "nextscale_ready") == dict.fromkeys(made, 1.0)


def test_a_stream_comes_through(client: OpenAI) -> None:
    asked = {**SMALL, "extra_body": {"seed": 7, "previews": "all"}}
    with client.images.generate(prompt="a red fox", stream=True, **asked) as stream:
        begun, events = time.monotonic(), []
        for event in stream:
            events.append((event.type.rpartition(".")[2], time.monotonic() - begun, event.b64_json))
    assert len(events) >= 4
    assert [kind for kind, _, _ in events] == ["partial_image"] * (len(events) - 1) + ["completed"]
    assert events[0][1] < events[-1][1], "previews come while the image is made"
    assert events[-1][2] == draw(client).data[0].b64_json
    assert base64.b64decode(events[-1][2]).startswith(b"\x89PNG")


def test_errors_have_their_form(client: OpenAI, url: str) -> None:
    def require_form(error: APIStatusError, code: str) -> None:
        assert set(error.response.json()["error"]) == {"message", "type", "param", "code"}
        assert error.code == code
        assert len(error.response.headers.get_list("x-request-id")) == 1

    with pytest.raises(BadRequestError) as bad:
        draw(client, size="3x3")
    require_form(bad.value, "invalid_value")
    with pytest.raises(AuthenticationError) as unknown:
        draw(client.with_options(api_key="another"))
    require_form(unknown.value, "invalid_api_key")
    with pytest.raises(APIStatusError) as long:
        client.images.generate(prompt="x" * 3 * 2**20)
    require_form(long.value, "body_too_large")
    for body in (b"x" * 2**21, iter([b"x" * 2**16] * 200)):  # the second says no length
        answer = httpx.post(f"{url}/v1/images/generations", content=body, headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code in (413, 415)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{url}/nothing").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{url}/health").json() == {"status": "ready"}


def test_a_client_who_leaves_is_noticed(client: OpenAI, url: str) -> None:
    def canceled() -> float:
        return sum(counts(url, "nextscale_requests_canceled_total").values())

    before = canceled()
    with client.images.generate(
        prompt="a red fox", stream=True, partial_images=3, extra_body={"method": "none"}, size="512x512"
    ) as stream:
        next(iter(stream))
    assert wait_for(lambda: canceled() == before + 1, 20), "a stream"
    with pytest.raises(Exception, match=r"[Tt]imed? ?out"):
        draw(client.with_options(timeout=1.0), size="512x512", extra_body={"method": "none"})
    assert wait_for(lambda: canceled() == before + 2, 20), "a request without stream"
    assert sum(counts(url, "nextscale_images_running").values()) == 0


def test_a_replica_dies_under_load(client: OpenAI, url: str) -> None:
    with Load(client.with_options(max_retries=2), 4) as load:
        os.kill(replicas()[0], signal.SIGKILL)
        before = len(load.answers)
        assert wait_for(lambda: len(counts(url, "nextscale_ready")) == 2), "another takes its place"
        assert wait_for(lambda: len(load.answers) > before + 8)
    assert Counter(map(str, load.answers)) == {"truncate:5": len(load.answers)}, "the client's own retry succeeds"


def test_what_a_dead_replica_leaves_can_be_tried_again(client: OpenAI, url: str) -> None:
    """Without retries: every request is answered, or refused in a way that the client may try again."""
    with Load(client, 4) as load:
        os.kill(replicas()[0], signal.SIGKILL)
        assert wait_for(lambda: len(counts(url, "nextscale_ready")) == 2)
    failed = [answer for answer in load.answers if isinstance(answer, Exception)]
    assert 0 < len(failed) <= 4, "those that it was at work on"
    for error in failed:
        assert isinstance(error, APIStatusError), error
        assert error.response.status_code in (500, 503)
        assert set(error.response.json()["error"]) == {"message", "type", "param", "code"}
        assert "retry-after-ms" in error.response.headers


def test_a_stream_whose_replica_dies_ends_with_an_error(client: OpenAI, url: str) -> None:
    slow = {"size": "512x512", "extra_body": {"method": "none", "previews": "all"}}
    with client.images.generate(prompt="a red fox", stream=True, **slow) as stream:
        next(iter(stream))
        for pid in replicas():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(APIError, match="the replica that worked on the request has died"):
            list(stream)
    assert wait_for(lambda: len(counts(url, "nextscale_ready")) == 2)


def test_another_method_by_config(client: OpenAI) -> None:
    with Load(client) as load:
        deploy(user_config={**CONFIG, "method": "truncate:6"})
        assert wait_for(lambda: load.answers[-4:] == ["truncate:6"] * 4)
    assert set(map(str, load.answers)) == {"truncate:5", "truncate:6"}, "nothing was lost"
    first = load.answers.index("truncate:6")
    assert "truncate:5" in load.answers[:first]


def test_health_while_the_only_replica_loads(url: str) -> None:
    """Nobody who asks for it waits, and other requests do."""
    deploy(num_replicas=1)
    ended, found = threading.Event(), list[tuple[float, int, str]]()

    def look() -> None:
        while not ended.is_set():
            begun = time.monotonic()
            answer = httpx.get(f"{url}/health", timeout=60)
            found.append((time.monotonic() - begun, answer.status_code, answer.text))
            time.sleep(0.05)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    deploy(num_replicas=1, user_config={**CONFIG, "method": "truncate:6"})
    ended.set()
    thread.join(60)
    assert {status for _, status, _ in found} == {200, 503}
    assert max(seconds for seconds, _, _ in found) < 10
    assert httpx.get(f"{url}/health").status_code == 200


def busy(client: OpenAI, requests: int, code: Callable[[RateLimitError], None]) -> Counter[str]:
    def ask(_: int) -> str:
        try:
            draw(client, size="512x512")
        except RateLimitError as error:
            code(error)
            return "refused"
        return "answered"

    with ThreadPoolExecutor(requests) as pool:
        return Counter(pool.map(ask, range(requests)))


def test_a_full_queue(client: OpenAI) -> None:
    """The engine's refusals, and those of Ray where it has a limit of its own."""

    def require_hint(error: RateLimitError) -> None:
        assert error.code == "queue_full"
        assert set(error.response.json()["error"]) == {"message", "type", "param", "code"}
        assert 0 < float(error.response.headers["retry-after-ms"]) <= 60_000
        assert int(error.response.headers["retry-after"]) >= 1

    deploy(num_replicas=1, user_config={**CONFIG, "max_queue": 1})
    found = busy(client, 8, require_hint)
    assert found["refused"] >= 4
    assert found["answered"] >= 2
    deploy(num_replicas=1, max_ongoing_requests=1, max_queued_requests=1)
    found = busy(client, 8, require_hint)
    assert found["refused"] >= 4
    assert found["answered"] >= 1


def test_replicas_follow_the_load(client: OpenAI, url: str) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 1}
    quick = {"metrics_interval_s": 0.5, "look_back_period_s": 1}
    deploy(num_replicas=None, autoscaling_config={**scaling, **quick})
    with Load(client, 4):
        assert wait_for(lambda: len(counts(url, "nextscale_ready")) == 2)


def test_an_application_that_is_deleted_may_come_back(url: str) -> None:
    serve.delete(NAME)
    require_to_come_back(url)
