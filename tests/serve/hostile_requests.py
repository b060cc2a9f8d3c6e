"""Hostile requests against a server: `python tests/serve/hostile_requests.py --count 1000`.

Without --url a server of the embedded model is started in this process. A request passes if it is answered with a
status below 500 (or the connection is closed on it), in OpenAI's form, and without a word of the server's insides.
Meanwhile slow clients hold connections open. In the end the server must be ready and answer as quickly as before. Cases
are drawn from a seed; --only KIND shows one kind.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FIELDS = (
    *("prompt", "model", "n", "size", "quality", "output_format", "output_compression", "background", "stream"),
    *("response_format", "partial_images", "user", "safety_identifier", "moderation", "style", "complexity", "seed"),
    *("negative_prompt", "guidance_scale", "method", "previews"),
)
TEXTS = (
    *(
        "",
        " ",
        "\0",
        "\x1b[2J",
        "\r\n\r\nHTTP/1.1 200 OK",
        "\ud800",
        "\udfff\ud800",
        "\u202eabc",
        "\ufeff",
        "\U0010ffff",
    ),
    *("../../etc/passwd", "/dev/zero", "file:///etc/passwd", "http://169.254.169.254/", "${jndi:ldap://x}", "{{7*7}}"),
    *("'; drop table images; --", "<script>alert(1)</script>", "%s%s%n", "a" * 33_000, "9" * 5000, "none", "null"),
    *("-1", "1e999", "0x10", "٣", "512x512", "99999999999x99999999999", "-512x512", "512x0", "auto", "nova:(((((("),
    *("nova:/etc/passwd", "skipvar:decision=/dev/zero", "truncate:" + "9" * 500, "nova+" * 300, "truncate:13"),
    *("random_selection:like=(" * 60, "fastvar:scale_table=/proc/self/environ.json", "nova:alpha=" + "[" * 1000),
    *("toprovar:tau=NaN", "truncate:1e308", "nova:t_est=-1", "drop_guidance:" + "9" * 4000, "nova:\\u0000"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, -0.0, 10**18, 2**63, -(2**63), 10**100, 1e308, 5e-324, [], {}, [[]], {"": {}}),
    *([1] * 1000, {"prompt": "1"}, ["1"], [None], {"a" * 1000: 1}),
)
LITERALS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "-" + "9" * 100_000, "0" * 100, "1.", "01")
PATHS = (
    *(
        "/../../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/page.js/../../app.py",
        "//etc/passwd",
    ),
    *(
        "/page.js%00.html",
        "/page.js/",
        "/.git/config",
        "/v1/models/../../page/index.html",
        "/v1/models/%00",
        "/v1/models/",
    ),
    *(
        "/v1/models/" + "a" * 60_000,
        "/v1/models/%ff%fe",
        "/v1/models/..%5c..%5c",
        "/\\..\\..\\windows",
        "/?" + "a=b&" * 9000,
    ),
    *("/v1/methods?model=%00", "/v1/methods?model=../x", "/v1/methods?" + "model=a&" * 3000, "/metrics/../v1/models"),
    *(
        "/v1//models",
        "/V1/models",
        "/v1/models;a=b",
        "/v1/models#x",
        "http://other.example/v1/models",
        "*",
        "/%",
        "/%zz",
    ),
    *("/docs", "/redoc", "/openapi.json/..", "/static/../app.py", "/page/index.html", "/index.html", "/%c0%ae%c0%ae/"),
)
METHODS = (
    "GET",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "get",
    "BREW",
    "A" * 900,
)
PROMPTS = ("1", "a red fox")  # each is fine for one of the models that are attacked
PATIENCE = 120.0  # seconds: some ask for images, and wait for their turn
SILENCE = 2.0  # seconds; a stream may be as silent while its image is made
SECRETS = re.compile(rb'Traceback|File "|\.py:\d|site-packages|root:x:0|Error\(|<class|object at 0x')


@dataclass
class Attack:
    """Bytes for one connection, sent in parts, and what happens to it afterwards."""

    parts: list[bytes]
    half_close: bool = False
    pause: float = 0.0  # seconds between the parts
    leaves: bool = False  # without reading an answer
    answered: bool = True  # whether there must be an answer


@dataclass
class Verdict:
    kind: str
    status: int  # 0: the connection was closed without an answer
    seconds: float
    problem: str = ""


@dataclass
class Report:
    verdicts: list[Verdict]
    before: tuple[float, float]  # seconds of simple requests, and of an image
    after: tuple[float, float]
    alive: bool
    problems: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        statuses = collections.Counter(v.status for v in self.verdicts)
        yield f"{len(self.verdicts)} requests: " + ", ".join(
            f"{n} x {s or 'closed'}" for s, n in sorted(statuses.items())
        )
        slowest = max(self.verdicts, key=lambda v: v.seconds)
        yield f"slowest {slowest.seconds:.2f} s ({slowest.kind})"
        for what, before, after in zip(("a simple request", "an image"), self.before, self.after, strict=True):
            yield f"{what} took {1000 * before:.1f} ms before and {1000 * after:.1f} ms after"
        yield from self.problems


def request(
    body: bytes, headers: Sequence[str] = (), path: str = "/v1/images/generations", method: str = "POST"
) -> bytes:
    given = {line.partition(":")[0].lower() for line in headers}
    lines = [f"{method} {path} HTTP/1.1", *headers]
    lines += [] if "host" in given else ["Host: localhost"]
    lines += [] if "content-type" in given else ["Content-Type: application/json"]
    lines += [] if {"content-length", "transfer-encoding"} & given else [f"Content-Length: {len(body)}"]
    lines += [] if "connection" in given else ["Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body


def as_json(content: Any) -> bytes:
    return json.dumps(content).encode("utf-8", "surrogatepass")


def valid(draw: random.Random) -> dict[str, Any]:
    return {
        "prompt": draw.choice(PROMPTS),
        "n": draw.randint(1, 2),
        "seed": draw.randrange(2**32),
        "stream": draw.random() < 0.5,
    }


def wrong_types(draw: random.Random) -> Attack:
    name = draw.choice(FIELDS)
    value = draw.choice(VALUES) if draw.random() < 0.5 else draw.choice(TEXTS)
    return Attack([request(as_json({**valid(draw), "prompt": "no such word", name: value}))])


def wrong_fields(draw: random.Random) -> Attack:
    names = ["".join(draw.choices("ab\0\r\n\ud800\u202e\x7f", k=draw.choice((1, 10, 5000)))) for _ in range(3)]
    return Attack([request(as_json({"prompt": "1", **dict.fromkeys(names, 1)}))])


def numbers(draw: random.Random) -> Attack:
    literal = draw.choice(LITERALS)
    name = draw.choice(("n", "seed", "guidance_scale", "output_compression", "partial_images"))
    return Attack([request(f'{{"prompt": "no such word", "{name}": {literal}}}'.encode())])


def texts(draw: random.Random) -> Attack:
    text = "".join(
        chr(draw.choice((draw.randrange(32), draw.randrange(0x110000)))) for _ in range(draw.randint(1, 400))
    )
    return Attack([request(as_json({"prompt": text, "negative_prompt": draw.choice(TEXTS), "user": text[:200]}))])


def methods(draw: random.Random) -> Attack:
    return Attack([request(as_json({"prompt": "1", "method": draw.choice(TEXTS)}))])


def broken_json(draw: random.Random) -> Attack:
    body = bytearray(as_json(valid(draw)))
    for _ in range(draw.randint(1, 6)):
        place = draw.randrange(len(body))
        choice = draw.randrange(3)
        if choice == 0:
            body[place] = draw.randrange(256)
        elif choice == 1:
            del body[place:]
            body += b"{"
        else:
            body[place:place] = draw.randbytes(3)
    return Attack([request(bytes(body))])


def encodings(draw: random.Random) -> Attack:
    body = as_json(valid(draw)).decode().encode(draw.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7", "cp500")))
    coding = draw.choice(
        ("Content-Encoding: gzip", "Content-Encoding: br, br", "Content-Language: x", "Accept: nothing")
    )
    return Attack([request(body, [coding])])


def deep_json(draw: random.Random) -> Attack:
    depth = draw.choice((100, 1000, 5000, 100_000))
    opening, closing = draw.choice(((b"[", b"]"), (b'{"prompt":', b"}"), (b'{"a":[', b"]}")))
    depth = min(depth, 900_000 // len(opening + closing))
    return Attack([request(opening * depth + (b"1" + closing * depth if draw.random() < 0.5 else b""))])


def huge_bodies(draw: random.Random) -> Attack:
    size = draw.choice((2**20 - 5, 2**20 + 1, 3 * 2**20))
    body = draw.choice(
        (b" " * size, b'"' + b"a" * size + b'"', b'{"prompt": "' + b"a" * size + b'"}', b"[" + b"1," * (size // 2))
    )
    return Attack([request(body)])


def lying_lengths(draw: random.Random) -> Attack:
    length = draw.choice(
        ("99999999999999999999999", "-1", "1e3", "0x10", "5, 5", "5\r\nContent-Length: 6", "", " 4", "٣")
    )
    return Attack(
        [request(b'{"prompt": "1"}', [f"Content-Length: {length}"])], answered=False, leaves=draw.random() < 0.5
    )


def too_short(draw: random.Random) -> Attack:
    body = request(b'{"prompt": "1"}' + b" " * 1000)
    return Attack([body[: draw.randrange(10, len(body))]], half_close=draw.random() < 0.5, leaves=True, pause=0.05)


def multipart(draw: random.Random) -> Attack:
    boundary = draw.choice(("x", "", '"', "a" * 5000, "x\0"))
    body = b"--x\r\nContent-Disposition: form-data; name=prompt\r\n\r\n1\r\n" + b"--x--" * draw.choice((0, 1, 1000))
    return Attack([request(body, [f"Content-Type: multipart/form-data; boundary={boundary}"])])


def content_types(draw: random.Random) -> Attack:
    kind = draw.choice(
        (
            "text/plain",
            "",
            "application/x-www-form-urlencoded",
            "application/json" * 500,
            "\xff",
            "application/json;" * 99,
        )
    )
    return Attack([request(b"prompt=1", [f"Content-Type: {kind}"])], answered="\xff" not in kind)


def slow_clients(draw: random.Random) -> Attack:
    data = request(as_json({"prompt": "no such word"}))
    places = sorted(draw.sample(range(1, len(data)), 6))
    parts = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    return Attack(parts, pause=draw.uniform(0.005, 0.05))


def half_closed(draw: random.Random) -> Attack:
    data = request(as_json(valid(draw)), ["Connection: keep-alive"])
    return Attack([data if draw.random() < 0.5 else data[: draw.randrange(len(data))]], half_close=True, answered=False)


def gone_at_once(draw: random.Random) -> Attack:
    content = {"prompt": draw.choice(PROMPTS), "stream": True, "partial_images": 3}
    return Attack([request(as_json(content)), b""], leaves=True, pause=draw.uniform(0, 0.5))


def paths(draw: random.Random) -> Attack:
    return Attack(
        [request(b"", path=draw.choice(PATHS), method=draw.choice(("GET", "GET", "HEAD", "POST")))], answered=False
    )


def verbs(draw: random.Random) -> Attack:
    path = draw.choice(
        ("/", "/health", "/metrics", "/v1/models", "/v1/images/generations", "/page.js", "/openapi.json")
    )
    return Attack([request(b"", path=path, method=draw.choice(METHODS))], answered=False)


def bad_http(draw: random.Random) -> Attack:
    data = draw.choice(
        (
            draw.randbytes(draw.choice((1, 100, 10_000))) + b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET  /  HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\n\n",
            b"GET / HTTP/1.1\r\nHost\r\n\r\n",
            b"GET / HTTP/1.1\r\n: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nA B: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nX: a\0b\r\n\r\n",
            b"GET / HTTP/1.1\r\nX: a\r\n folded\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET http://[::1 HTTP/1.1\r\n\r\n",
            b"GET \xff\xfe HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(100),
            b"CONNECT localhost:22 HTTP/1.1\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\nConnection: close\r\n\r\n",
            b"GET /health HTTP/1.0\r\n\r\n" * 100,
            b"\r\n" * 5000,
            request(
                b"", ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAAA"], "/health", "GET"
            ),
        )
    )
    return Attack([data], answered=False, half_close=draw.random() < 0.3)


def smuggled(draw: random.Random) -> Attack:
    inner = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    kinds = ("chunked", "chunked, identity", "xchunked", " chunked", "chunked\r\nTransfer-Encoding: x", "\x0bchunked")
    return Attack(
        [request(b"0\r\n\r\n" + inner, [f"Transfer-Encoding: {draw.choice(kinds)}", "Content-Length: 4"])],
        answered=False,
    )


def chunks(draw: random.Random) -> Attack:
    body = draw.choice(
        (
            b"zz\r\n{}\r\n0\r\n\r\n",
            b"-1\r\n{}\r\n",
            b"ffffffffffffffffff\r\n{}\r\n",
            b"2\r\n{}\r\n" * 100 + b"0\r\n\r\n",
            b"2;" + b"x" * 50_000 + b"\r\n{}\r\n0\r\n\r\n",
            b"1\r\n{\r\n" * 20_000 + b"0\r\n\r\n",
            b"2\r\n{}x0\r\n\r\n",
            b"0\r\n" + b"Trailer: x\r\n" * 2000 + b"\r\n",
            b"2\r\n{}\r\n",
        )
    )
    attack = Attack([request(body, ["Transfer-Encoding: chunked"])], answered=False)
    attack.leaves = body == b"2\r\n{}\r\n"  # the rest never comes
    return attack


def header_floods(draw: random.Random) -> Attack:
    lines = draw.choice(
        (
            ["X: y"] * 3000,
            [f"X-{n}: {'y' * 100}" for n in range(2000)],
            ["X: " + "y" * 200_000],
            ["Y" * 70_000 + ": x"],
            ["Cookie: " + "a=b; " * 20_000],
        )
    )
    return Attack([request(b"", lines, "/health", "GET")], answered=False)


def odd_headers(draw: random.Random) -> Attack:
    line = draw.choice(
        (
            *("X-Request-Id: " + text for text in ("a\tb", "<script>", "a" * 5000, "\x80\xff", "../..")),
            *("Authorization: " + text for text in ("Bearer", "Bearer \xff", "Basic " + "A" * 9000, "Bearer  ", "\0")),
            *("Host: " + text for text in ("", "a b", "evil.example", "x" * 9000, "[::")),
            *(
                "Origin: null",
                "Range: bytes=-1",
                "Expect: 100-continue",
                "Expect: 200-ok",
                "X-HTTP-Method-Override: PUT",
            ),
            *(
                "If-None-Match: *",
                "Accept-Encoding: gzip;q=9",
                "Forwarded: for=\x7f",
                "X-Forwarded-For: " + "1," * 5000,
            ),
        )
    )
    path, method = draw.choice((("/v1/models", "GET"), ("/v1/images/generations", "POST"), ("/page.js", "GET")))
    body = b'{"prompt": "no such word"}' if method == "POST" else b""
    return Attack([request(body, [line], path, method)], answered=False)


def pipelines(draw: random.Random) -> Attack:
    one = request(b"", ["Connection: keep-alive"], "/health", "GET")
    return Attack(
        [one * draw.choice((10, 300)) + draw.choice((b"", b"\0\0", b"GARBAGE\r\n\r\n"))],
        half_close=True,
        answered=False,
    )


KINDS: tuple[Callable[[random.Random], Attack], ...] = (
    *(wrong_types, wrong_types, wrong_fields, numbers, texts, methods, broken_json, encodings, deep_json, huge_bodies),
    *(lying_lengths, too_short, multipart, content_types, slow_clients, half_closed, gone_at_once, paths, paths, verbs),
    *(bad_http, bad_http, smuggled, chunks, header_floods, odd_headers, pipelines),
)


def play(address: tuple[str, int], kind: Callable[[random.Random], Attack], seed: int) -> Verdict:
    attack = kind(random.Random(seed))
    begun, answer, problem = time.monotonic(), b"", ""
    try:
        with socket.create_connection(address, timeout=PATIENCE) as sock:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for n, part in enumerate(attack.parts):
                    time.sleep(attack.pause if n else 0)
                    sock.sendall(part)
                if attack.half_close:
                    sock.shutdown(socket.SHUT_WR)
            if attack.leaves:
                time.sleep(attack.pause)
            else:
                answer = read_answer(sock)
    except TimeoutError:
        problem = f"no end within {PATIENCE:g} s"
    except OSError as error:
        problem = f"no connection: {error}"
    answer = re.sub(rb"^HTTP/1\.1 100 .*?\r\n\r\n", b"", answer)
    status = int(answer[9:12]) if re.match(rb"HTTP/1\.1 \d\d\d ", answer) else 0
    return Verdict(kind.__name__, status, time.monotonic() - begun, problem or wrong_with(answer, status, attack))


def read_answer(sock: socket.socket) -> bytes:
    """Until the server closes, or has said something and is silent."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while True:
            try:
                part = sock.recv(65536)
            except TimeoutError:
                if not parts:
                    raise
                break
            if not part:
                break
            parts.append(part)
            sock.settimeout(SILENCE)
    return b"".join(parts)


def wrong_with(answer: bytes, status: int, attack: Attack) -> str:
    """What a client must not see; empty: nothing."""
    if not answer:
        return "" if attack.leaves or not attack.answered else "no answer"
    head, _, body = answer.partition(b"\r\n\r\n")
    if length := re.search(rb"\ncontent-length: (\d+)", head):  # another answer may follow
        body = body[: int(length[1])]
    if not status or (status >= 500 and status != 503):
        return f"status {answer[:40]!r}"
    if status >= 400 and (found := SECRETS.search(answer)):
        return f"says {found[0]!r}"
    if b"\nx-request-id: " not in head.lower():
        return "has no x-request-id"
    if status >= 400 and body:
        try:
            error = json.loads(body)["error"]
            complete = set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 1000
        except (ValueError, TypeError, KeyError):
            complete = False
        return "" if complete else f"is not in OpenAI's form: {body[:80]!r}"
    return ""


def good_requests(address: tuple[str, int]) -> tuple[float, float]:
    """Seconds that a simple request takes with a refused one, and an image: medians of several."""
    taken, images = [], []
    for _ in range(15):
        begun = time.monotonic()
        for data in (request(b"", path="/v1/models", method="GET"), request(b'{"prompt": "1", "n": 0}')):
            with socket.create_connection(address, timeout=PATIENCE) as sock:
                sock.sendall(data)
                assert read_answer(sock).startswith(b"HTTP/1.1")
        taken.append(time.monotonic() - begun)
    while len(images) < 3:
        begun = time.monotonic()
        answers = []
        for prompt in PROMPTS:
            with socket.create_connection(address, timeout=PATIENCE) as sock:
                sock.settimeout(PATIENCE)
                sock.sendall(request(as_json({"prompt": prompt, "seed": 7})))
                answers.append(read_answer(sock)[:12])
        assert b"HTTP/1.1 200" in answers, answers
        images.append(time.monotonic() - begun)
    return statistics.median(taken), statistics.median(images)


@contextlib.contextmanager
def held_connections(address: tuple[str, int], count: int) -> Iterator[None]:
    """Clients who never finish their headers or bodies, and send a byte now and then."""
    ended = threading.Event()

    def hold() -> None:
        socks: list[socket.socket] = []
        while not ended.wait(0.5):
            while len(socks) < count:
                with contextlib.suppress(OSError):
                    socks.append(socket.create_connection(address, timeout=5))
                    head = request(b"", ["Content-Length: 100"])
                    socks[-1].sendall(head if len(socks) % 2 else head[:30])
            for sock in list(socks):
                try:
                    sock.sendall(b"x")
                except OSError:
                    socks.remove(sock)
                    sock.close()
        for sock in socks:
            sock.close()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)


def attack_server(
    address: tuple[str, int], count: int, seed: int = 0, only: str | None = None, held: int = 20, threads: int = 8
) -> Report:
    kinds = [kind for kind in KINDS if only in (None, kind.__name__)]
    before = good_requests(address)
    with held_connections(address, held), ThreadPoolExecutor(threads) as pool:
        cases = [(kinds[n % len(kinds)], seed * 1_000_000 + n) for n in range(count)]
        verdicts = list(pool.map(lambda case: play(address, *case), cases))
    time.sleep(1)  # for the last connections to end
    again = [good_requests(address) for _ in range(3)]
    after = min(simple for simple, _ in again), min(image for _, image in again)
    with socket.create_connection(address, timeout=PATIENCE) as sock:
        sock.sendall(request(b"", path="/health", method="GET"))
        alive = read_answer(sock).startswith(b"HTTP/1.1 200")
    report = Report(verdicts, before, after, alive)
    report.problems += [f"{v.kind}: {v.problem}" for v in verdicts if v.problem]
    report.problems += [] if alive else ["the server is no longer ready"]
    for old, new in zip(before, after, strict=True):
        report.problems += [f"slower than before: {new:.3f} s, not {old:.3f}"] if new > 1.25 * old + 0.02 else []
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server, as http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted({kind.__name__ for kind in KINDS}), help="one kind")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if args.url is None:
            sys.path.insert(0, str(Path(__file__).parent))
            from live_server import served

            from nextscale.pipeline import Pipeline
            from nextscale.serve.served_model import ServedModel
            from nextscale.serve.server import log_to_stderr

            log_to_stderr("warning")
            live = stack.enter_context(served([ServedModel(Pipeline.from_pretrained(), method="truncate:8")]))
            address = "127.0.0.1", live.port
        else:
            parts = urlsplit(args.url)
            address = parts.hostname or "127.0.0.1", parts.port or 80
        report = attack_server(address, args.count, args.seed, args.only)
    print("\n".join(report.lines()))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
