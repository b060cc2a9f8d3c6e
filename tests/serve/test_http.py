"""HTTP below the client: bytes on the wire, connections that misbehave, the other routes, and the command."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs pip install 'nextscale[serve]'")

from live_server import FAULT, FINISHED, PREVIEW, Live, ScriptedEngine, running, served
from support.commands import run

from nextscale.errors import NextscaleError
from nextscale.pipeline import Pipeline
from nextscale.serve import limits, server, stream
from nextscale.serve.app import create_app
from nextscale.serve.jobs import Finished
from nextscale.serve.served_model import ServedModel

POST = "POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def connection(live: Live) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    """Until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def send(live: Live, data: bytes) -> bytes:
    with connection(live) as sock:
        sock.sendall(data)
        return read_all(sock)


def ask(
    live: Live, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    client = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    client.request(method, path, content, {"content-type": "application/json", **(headers or {})})
    answer = client.getresponse()
    data = answer.read()
    client.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, data


def error_of(data: bytes) -> dict[str, Any]:
    """The error of a response, with or without its headers."""
    content = json.loads(data[data.index(b'{"error"') :])["error"]
    assert set(content) == {"message", "type", "param", "code"}
    return content


def post(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in (*headers, f"Content-Length: {len(body)}", "Connection: close"))
    return f"{POST}{lines}\r\n".encode() + body


def unchunked(data: bytes) -> bytes:
    parts = []
    while data:
        length, _, rest = data.partition(b"\r\n")
        parts.append(rest[: int(length, 16)])
        data = rest[int(length, 16) + 2 :]
    return b"".join(parts)


def test_the_bytes_of_a_stream(scripted: Live) -> None:
    scripted.engine.script = [PREVIEW, FINISHED]
    head, _, body = send(scripted, post(b'{"prompt": "1", "stream": true, "partial_images": 1, "seed": 7}')).partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\ncontent-type: text/event-stream; charset=utf-8\r\n" in head
    assert b"\r\ncache-control: no-store\r\n" in head
    text = unchunked(body)
    assert text.isascii()
    events = text.decode().split("\n\n")
    assert events.pop() == ""
    assert [event.split("\n")[0] for event in events] == [
        "event: image_generation.partial_image",
        "event: image_generation.completed",
    ]
    for event in events:
        name, data = event.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert content["type"] == name.removeprefix("event: ")
        assert base64.b64decode(content["b64_json"]).startswith(b"\x89PNG")
    assert scripted.engine.canceled.is_set()  # which means nothing after the end


def test_a_failure_after_the_start_is_an_event(scripted: Live) -> None:
    scripted.engine.script = [PREVIEW, FAULT]
    data = send(scripted, post(b'{"prompt": "1", "stream": true}'))
    last = unchunked(data.partition(b"\r\n\r\n")[2]).decode().split("\n\n")[-2].split("\n")
    assert last[0] == "event: error"
    assert error_of(last[1].encode())["code"] == "internal_error"


def test_a_fault_is_not_to_be_tried_again(scripted: Live) -> None:
    scripted.engine.script = [FAULT]
    status, headers, _ = ask(scripted, "POST", "/v1/images/generations", {"prompt": "1"})
    assert (status, headers["x-should-retry"]) == (500, "false")


def test_silence_is_filled_with_comments(scripted: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.05)
    scripted.engine.script = [0.3, FINISHED]
    text = unchunked(send(scripted, post(b'{"prompt": "1", "stream": true}')).partition(b"\r\n\r\n")[2])
    assert text.startswith(b": still here\n\n: still here\n\n")
    assert text.count(b"event: ") == 1


@pytest.mark.parametrize("as_stream", [False, True])
def test_who_leaves_gives_the_job_up(scripted: Live, as_stream: bool) -> None:
    for shut in (False, True):
        scripted.engine.canceled.clear()
        scripted.engine.script = [30.0, FINISHED]
        with connection(scripted) as sock:
            sock.sendall(post(json.dumps({"prompt": "1", "stream": as_stream}).encode()))
            assert scripted.wait_for(lambda: bool(scripted.engine.jobs))
            assert not scripted.engine.canceled.wait(0.1)
            if shut:
                sock.shutdown(socket.SHUT_WR)
                assert scripted.engine.canceled.wait(5)
        assert scripted.engine.canceled.wait(5)
        scripted.engine.jobs.clear()


def test_request_ids(small: Live) -> None:
    for given in ("abc-1.2:3_4", "x" * 128):
        assert ask(small, "GET", "/health", headers={"x-request-id": given})[1]["x-request-id"] == given
    for given in ("", "a b", "x" * 129, "\xe9", "<script>"):
        made = ask(small, "GET", "/health", headers={"x-request-id": given})[1]["x-request-id"]
        assert re.fullmatch("req_[0-9a-f]{32}", made)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/none", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/a/b%ff", 404, "model_not_found"),
        ("GET", "/v1/models/a%0ab", 404, "not_found"),
        ("GET", "/v1/methods?model=none", 404, "model_not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/health/", 404, "not_found"),
        ("GET", "//v1/models", 404, "not_found"),
        ("GET", "/v1/images/generations", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
        ("PROPFIND", "/health", 405, "method_not_allowed"),
        ("POST", "/", 405, "method_not_allowed"),
    ],
)
def test_routes_that_are_not_there(small: Live, method: str, path: str, status: int, code: str) -> None:
    got, headers, data = ask(small, method, path)
    assert (got, error_of(data)["code"]) == (status, code)
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    assert (status == 405) == ("allow" in headers)


@pytest.mark.parametrize("kind", ["text/plain", "", "application/jsonx", "multipart/form-data; boundary=x", "json"])
def test_other_content_types(small: Live, kind: str) -> None:
    status, _, data = ask(small, "POST", "/v1/images/generations", {"prompt": "1"}, {"content-type": kind})
    assert (status, error_of(data)["code"]) == (415, "unsupported_media_type")


def test_json_with_a_charset(small: Live) -> None:
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert ask(small, "POST", "/v1/images/generations", {"prompt": "1"}, kind)[0] == 200


def test_large_bodies(small: Live) -> None:
    fits = b'{"prompt": "1"' + b" " * (limits.MAX_BODY - 15) + b"}"
    assert ask(small, "POST", "/v1/images/generations", fits)[0] == 200
    for size in (limits.MAX_BODY + 1, 4 * limits.MAX_BODY):
        status, _, data = ask(small, "POST", "/v1/images/generations", b" " * size)
        assert (status, error_of(data)["code"]) == (413, "body_too_large")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    head = f"{POST}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    assert send(small, head + chunk * 20 + b"0\r\n\r\n").startswith(b"HTTP/1.1 413")
    announced = f"{POST}Expect: 100-continue\r\nContent-Length: 99999999\r\nConnection: close\r\n\r\n".encode()
    assert send(small, announced).startswith(b"HTTP/1.1 413")


def test_a_connection_goes_on_after_a_refused_body(small: Live) -> None:
    client = http.client.HTTPConnection("127.0.0.1", small.port, timeout=20)
    for _ in range(2):
        client.request("POST", "/v1/images/generations", b" " * (limits.MAX_BODY + 1), {"content-type": "text/plain"})
        assert client.getresponse().read()
        client.request("GET", "/health")
        assert client.getresponse().read() == b'{"status":"ready"}'
    client.close()


def test_idle_connections_outlive_those_of_proxies(small: Live) -> None:
    """Or a proxy would send a request on one that is just being closed, and answer 502."""
    assert small.server.config.timeout_keep_alive > 60


def test_slow_bodies(small: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    begun = time.monotonic()
    answer = send(small, f'{POST}Content-Length: 100\r\n\r\n{{"prompt"'.encode())
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"\r\nconnection: close\r\n" in answer
    assert error_of(answer)["code"] == "request_timeout"
    assert time.monotonic() - begun < 5


def test_slow_headers(small: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    assert send(small, b"") == b""
    with connection(small) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        begun = time.monotonic()
        for byte in b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)
    assert time.monotonic() - begun < 5
    with connection(small) as sock:  # the same for a second request
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += sock.recv(65536)
        sock.sendall(b"GET /hea")
        assert read_all(sock) == b""
    with connection(small) as sock:  # but not for who waits for an answer
        monkeypatch.setattr(server, "HEADER_SECONDS", 0.001)
        sock.sendall(post(b'{"prompt": "1"}'))
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_header_floods(small: Live) -> None:
    answer = send(small, b"GET /health HTTP/1.1\r\n" + b"X: " + b"y" * 300_000)
    assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400", b""))
    with connection(small) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(10_000):
            sock.sendall(b"X: " + b"y" * 1000 + b"\r\n")
        pytest.fail("nobody stopped it")


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\0\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nA B: x\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0" * 9,
        b"GET /health HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http(small: Live, data: bytes) -> None:
    answer = send(small, data)
    assert answer.startswith(b"HTTP/1.1 400")
    assert error_of(answer)["code"] == "invalid_http"
    assert b"x-request-id: req_" in answer


def test_requests_behind_each_other(small: Live) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = send(small, one * 50 + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.count(b'{"status":"ready"}') == 51


def test_upgrades_are_no_websockets(small: Live) -> None:
    head = "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    with connection(small) as sock:
        sock.sendall(f"{head}Sec-WebSocket-Key: aaaa\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_too_many_connections(scripted: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connection(scripted)).sendall(b"GET")
        time.sleep(0.1)
        answer = send(scripted, b"")
        assert answer.startswith(b"HTTP/1.1 503")
        assert error_of(answer)["code"] == "too_many_connections"
    assert scripted.wait_for(lambda: ask(scripted, "GET", "/health")[0] == 200)


def test_who_reads_nothing_is_given_up(scripted: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.3)
    noise = np.random.default_rng(0).integers(0, 255, (2000, 2000, 3), dtype=np.uint8)
    scripted.engine.script = [Finished(0, lambda: noise, 7, "none", 1, 1, 1, 0.1, 0.0)]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", scripted.port))
        sock.sendall(post(b'{"prompt": "1", "output_format": "jpeg", "output_compression": 100}'))
        assert scripted.wait_for(lambda: bool(scripted.server.server_state.connections))
        assert scripted.wait_for(lambda: not scripted.server.server_state.connections)
        assert sock.recv(100).startswith(b"HTTP/1.1 200")  # it was not finished, and nobody waits for the rest


def test_who_reads_too_slowly_is_given_up(scripted: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 2.0)
    monkeypatch.setattr(server, "READ_SECONDS", 1.0)
    noise = np.random.default_rng(0).integers(0, 255, (2000, 2000, 3), dtype=np.uint8)
    scripted.engine.script = [Finished(0, lambda: noise, 7, "none", 1, 1, 1, 0.1, 0.0)]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", scripted.port))
        sock.sendall(post(b'{"prompt": "1", "output_format": "jpeg", "output_compression": 100}'))
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(32768):
                data += part
                time.sleep(0.01)
    length = re.search(rb"content-length: (\d+)", data)
    assert length is not None
    assert len(data) < int(length[1])


def test_previews_that_nobody_reads_are_dropped() -> None:
    """And those that are read are numbered without a gap."""

    async def read() -> tuple[list[Any], int]:
        events = stream.EventQueue()
        for _ in range(40):
            events.put(PREVIEW)
        events.put(FINISHED)
        await asyncio.sleep(0)
        found = [await events.get(1) for _ in range(stream.MAX_UNREAD + 1)]
        events.put(PREVIEW)
        return [*found, await events.get(1)], events._queue.qsize()

    found, left = asyncio.run(read())
    assert found == [*[PREVIEW] * stream.MAX_UNREAD, FINISHED, PREVIEW]
    assert left == 0


def test_indices_of_previews_have_no_gap(scripted: Live) -> None:
    scripted.engine.script = [*(dataclasses.replace(PREVIEW, index=n) for n in (0, 2, 5)), FINISHED]
    text = unchunked(send(scripted, post(b'{"prompt": "1", "stream": true}')).partition(b"\r\n\r\n")[2]).decode()
    assert re.findall(r'"partial_image_index":(\d+)', text) == ["0", "1", "2"]


def test_without_a_key_only_names_of_this_machine_are_answered(var: Pipeline) -> None:
    with served([ServedModel(var, "small", method="none")], own_hosts_only=True) as live:
        for host in ("127.0.0.1", f"localhost:{live.port}", "[::1]:80", "LOCALHOST", "a.localhost", "192.0.2.7:1"):
            assert ask(live, "GET", "/health", headers={"host": host})[0] == 200
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", ""):
            status, _, data = ask(live, "GET", "/v1/models", headers={"host": host})
            assert (status, error_of(data)["code"]) == (403, "unknown_host")


def test_health(scripted: Live) -> None:
    for state, status in {"ready": 200, "loading": 503, "draining": 503}.items():
        scripted.engine.state = state
        got, headers, data = ask(scripted, "GET", "/health")
        assert (got, json.loads(data), headers["cache-control"]) == (status, {"status": state}, "no-store")
    assert ask(scripted, "HEAD", "/health")[2] == b""


def test_methods(small: Live) -> None:
    content = json.loads(ask(small, "GET", "/v1/methods?model=small")[2])
    assert content["default"] == "none"
    assert content["qualities"]["max"] == "none"
    nova = next(entry for entry in content["data"] if entry["id"] == "nova")
    assert {"balanced", "fast"} <= set(nova["presets"])
    assert nova["fields"]["alpha"] == 0.5
    assert nova["summary"].endswith(".")


def test_metrics(small: Live) -> None:
    before = small.count("nextscale_requests_rejected_total", reason="invalid_value")
    assert ask(small, "POST", "/v1/images/generations", {"prompt": "1", "n": 2})[0] == 200
    assert ask(small, "POST", "/v1/images/generations", {"prompt": "1", "n": 0})[0] == 400
    assert small.count("nextscale_requests_rejected_total", reason="invalid_value") == before + 1
    _, headers, data = ask(small, "GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=")
    values = dict(line.rsplit(" ", 1) for line in data.decode().splitlines() if not line.startswith("#"))
    assert float(values['nextscale_images_finished_total{model="small"}']) >= 2
    assert float(values['nextscale_scale_milliseconds_sum{model="small",scale="8"}']) > 0
    assert float(values["nextscale_batch_size_count"]) >= 1
    assert float(values["nextscale_queue_length"]) == 0
    assert float(values["nextscale_graphs_captured"]) == 0
    if sys.platform == "linux":
        assert float(values["process_resident_memory_bytes"]) > 2**26
    assert float(values["nextscale_ready"]) == 1


def test_schema(small: Live) -> None:
    schema = json.loads(ask(small, "GET", "/openapi.json")[2])
    operation = schema["paths"]["/v1/images/generations"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["prompt"]
    assert body["additionalProperties"] is False
    assert {"seed", "method", "partial_images", "previews"} <= set(body["properties"])
    assert not {"/", "/metrics"} & set(schema["paths"])


def test_the_page(small: Live) -> None:
    for path, kind in {"/": "text/html", "/page.css": "text/css", "/page.js": "javascript"}.items():
        status, headers, data = ask(small, "GET", path)
        assert status == 200
        assert kind in headers["content-type"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert data
        assert ask(small, "GET", path, headers={"if-none-match": headers["etag"]})[::2] == (304, b"")
        assert ask(small, "GET", path, headers={"if-none-match": "x", "range": "bytes=x"})[::2] == (200, data)
    for path in ("/page", "/page/", "/page/index.html", "/../pyproject.toml", "/%2e%2e/app.py", "/page.js/../app.py"):
        assert ask(small, "GET", path)[0] == 404


def test_other_sites_may_not_call_unless_told_so(small: Live) -> None:
    origin = {"origin": "https://example.com"}
    preflight = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    path = "/v1/images/generations"
    assert ask(small, "OPTIONS", path, headers=preflight)[0] == 405
    assert "access-control-allow-origin" not in ask(small, "GET", "/v1/models", headers=origin)[1]
    with running(ScriptedEngine(), api_key="key", cors_origins=["https://example.com"]) as live:
        status, headers, _ = ask(live, "OPTIONS", path, headers=preflight)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://example.com")
        status, headers, _ = ask(live, "GET", "/v1/models", headers=origin)
        assert (status, headers["access-control-allow-origin"]) == (401, "https://example.com")
        assert "retry-after-ms" in headers["access-control-expose-headers"]
        headers = ask(live, "GET", "/v1/models", headers={"origin": "https://example.org"})[1]
        assert "access-control-allow-origin" not in headers
        assert ask(live, "GET", "/health")[0] == 200
        for given in ("key", "Basic key", "Bearer", "Bearer k\xe9y", "Bearer " + "k" * 5000):
            assert ask(live, "GET", "/v1/models", headers={"authorization": given})[0] == 401
        assert ask(live, "GET", "/v1/models", headers={"authorization": "bearer key"})[0] == 200


def test_the_key_guards_every_route_of_the_api(small: Live) -> None:
    paths = json.loads(ask(small, "GET", "/openapi.json")[2])["paths"]
    asked = [(method.upper(), path.replace("{name}", "small")) for path, methods in paths.items() for method in methods]
    assert {("POST", "/v1/images/generations"), ("GET", "/v1/models/small"), ("GET", "/v1/methods")} <= set(asked)
    with running(ScriptedEngine(), api_key="key") as live:
        for method, path in asked:
            for headers in ({}, {"authorization": "Bearer KEY"}):
                status, _, data = ask(live, method, path, b"[", headers)
                assert (status, error_of(data)["code"]) == (401, "invalid_api_key")
        for path in ("/", "/health", "/metrics"):
            assert ask(live, "GET", path)[0] == 200


BAD_OPTIONS = {
    ("--port", "70000"): "--port",
    ("--method", "none such"): "unknown method",
    ("--max-batch", "0"): "--max-batch",
    ("--max-queue", "0"): "--max-queue",
    ("--batch-wait-ms", "-1"): "--batch-wait-ms",
    ("--runtime", "fast"): "unknown runtime 'fast'",
    ("--warm", "512"): "is not a list of sizes",
    ("--device", "tpu"): "unknown device",
    ("--dtype", "int8"): "dtype",
    ("--quantize", "fp8", "--device", "cpu"): "needs a CUDA GPU",
    ("--grace", "-1"): "--grace",
    ("--cors-origin", "example.com"): "is not an origin",
    ("--log-level", "loud"): "unknown log level 'loud'; allowed: debug, info, warning, error",
    ("--api-key", ""): "the API key must be",
    ("--api-key", "a b"): "the API key must be",
    ("--host", "no.such.host.invalid"): "is not the name of this machine",
    ("--host", "192.0.2.1"): "cannot listen on 192.0.2.1",
    ("--model", "none-such"): "unknown model 'none-such'",
    ("--model", "clipart", "--model", "clipart"): "both named clipart",
}


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=" ".join)
def test_options_are_checked_before_a_model_is_loaded(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda *args, **more: pytest.fail("a model was loaded"))
    done = run("serve", "--port", "0", *options)
    assert done.returncode == 2, done
    assert BAD_OPTIONS[options] in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_warm_size_must_be_one_of_the_model() -> None:
    done = run("serve", "--port", "0", "--warm", "512x512,511x512")
    assert done.returncode == 2
    assert "--warm 511x512 is not a size of the model; allowed: 512x512, " in done.stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["nextscale.cli.serve"], "NEEDED", ("fastapi", "no_such_package"))
    done = run("serve")
    assert done.returncode == 2
    assert "nextscale serve needs no_such_package: pip install 'nextscale[serve]'" in done.stderr


def test_the_end_of_an_engine_is_the_end_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "log_to_stderr", lambda level: None)
    engine = ScriptedEngine(state="failed", failure=NextscaleError("the device is lost"))
    with pytest.raises(NextscaleError, match="the device is lost"):
        server.serve(create_app(engine), engine, server.listen("127.0.0.1", 0))


def test_a_port_that_somebody_takes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "log_to_stderr", lambda level: None)
    engine, first = ScriptedEngine(), server.listen("localhost", 0)
    with server.listen("127.0.0.1", first.getsockname()[1]) as second:
        second.listen()
        with pytest.raises(NextscaleError, match=r"cannot listen on .*: the port is in use"):
            server.serve(create_app(engine), engine, first)


class Process:
    """`nextscale serve` as users start it."""

    def __init__(self, *options: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
        command = [sys.executable, "-m", "nextscale", "serve", "--port", "0", "--device", "cpu", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline() for _ in range(2)]
        self.port = int(self.lines[1].rpartition(":")[2])

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_signal_ends_it_well() -> None:
    with Process("--method", "truncate:3", "--grace", "120") as server_process:
        assert re.fullmatch(r"warming up; soon at http://127\.0\.0\.1:\d+\n", server_process.lines[0])
        assert re.fullmatch(r"ready at http://127\.0\.0\.1:\d+\n", server_process.lines[1])
        taken = run("serve", "--port", server_process.port)
        assert taken.returncode == 2
        assert f"cannot listen on 127.0.0.1:{server_process.port}: the port is in use" in taken.stderr
        live = Live("", server_process.port)
        answers: list[tuple[int, dict[str, str], bytes]] = []
        body = {"prompt": "a red fox"}
        accepted = [
            threading.Thread(target=lambda: answers.append(ask(live, "POST", "/v1/images/generations", body)))
            for _ in range(4)
        ]
        for thread in accepted:
            thread.start()
        counted = r"^nextscale_(?:queue_length|images_running|images_finished_total.*) ([0-9.]+)$"
        assert live.wait_for(
            lambda: sum(map(float, re.findall(counted, ask(live, "GET", "/metrics")[2].decode(), re.MULTILINE))) >= 4
        )
        server_process.process.send_signal(signal.SIGTERM)
        assert live.wait_for(lambda: ask(live, "GET", "/health")[::2] == (503, b'{"status":"draining"}'))
        status, headers, data = ask(live, "POST", "/v1/images/generations", body)
        assert (status, error_of(data)["code"]) == (503, "shutting_down")
        assert headers["retry-after-ms"]
        for thread in accepted:
            thread.join(60)
        assert [status for status, _, _ in answers] == [200] * 4
        out, err = server_process.process.communicate(timeout=30)
        assert server_process.process.returncode == 0
        assert "shutting down: " in out
        assert err == ""


@pytest.mark.parametrize("as_stream", [False, True])
def test_what_does_not_end_in_time_gets_a_clean_error(embedded: Pipeline, as_stream: bool) -> None:
    with served([ServedModel(embedded, method="none")], grace=0.1) as live:
        answers: list[tuple[int, dict[str, str], bytes]] = []
        body = {"prompt": "a red fox", "stream": as_stream}
        accepted = [
            threading.Thread(target=lambda: answers.append(ask(live, "POST", "/v1/images/generations", body)))
            for _ in range(2)
        ]
        for thread in accepted:
            thread.start()
        assert live.wait_for(lambda: live.engine.running + live.engine.waiting >= 2)
        live.server.asked_to_stop = True
        for thread in accepted:
            thread.join(30)
        assert [status for status, _, _ in answers] == [200 if as_stream else 503] * 2
        for _, _, data in answers:
            assert data.startswith(b"event: error\ndata: {" if as_stream else b"{")
            assert error_of(data)["code"] == "shutting_down"


STUCK = """
import os, signal, torch
from nextscale.serve import engine, server
from nextscale.serve.app import create_app
from nextscale.serve.served_model import ServedModel
from nextscale.testing import tiny_var

class Stuck(ServedModel):
    def warm_up(self, batches):
        while True:
            torch.ones(99, 99) @ torch.ones(99, 99)

def say(line):
    if line.startswith("warming up"):
        os.kill(os.getpid(), signal.SIGTERM)

engine.LOADING_SECONDS = 0.1
made = engine.Engine([Stuck(tiny_var())])
made.start()
server.serve(create_app(made), made, server.listen("127.0.0.1", 0), grace=50, say=say)
"""


def test_a_signal_ends_a_warm_up() -> None:
    """Also one that takes minutes, for nothing was accepted yet."""
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=45)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_second_signal_ends_it_at_once() -> None:
    with Process("--method", "truncate:8") as server_process:
        live = Live("", server_process.port)
        body = {"prompt": "a red fox", "method": "none"}

        def give_up() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask(live, "POST", "/v1/images/generations", body)

        thread = threading.Thread(target=give_up)
        thread.start()
        time.sleep(0.5)
        for _ in range(2):
            server_process.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        _, err = server_process.process.communicate(timeout=3)
        assert server_process.process.returncode == 130
        assert err == "stopped\n"
        thread.join(10)
