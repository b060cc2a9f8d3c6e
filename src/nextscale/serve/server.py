"""A uvicorn server that ends well: a signal drains the engine, and connections that wait for ever are cut off."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from nextscale.errors import NextscaleError
from nextscale.serve.engine import Engine
from nextscale.serve.errors import SERVER, ApiError, as_ascii

HEADER_SECONDS = 10.0  # for the headers of a request, and for what is left of a refused body
WRITE_SECONDS = 60.0  # in which a client must take something of what waits for it
READ_SECONDS = 600.0  # in which it must have taken all of that
IDLE_SECONDS = 75  # between the requests of a connection: proxies use theirs for 60, and fail on a closed one
LAST_SECONDS = 10  # for answers to leave, after the engine has stopped
MAX_HEADERS = 2**16  # bytes
MAX_CONNECTIONS = 500
STOPPED = 130
LOGGERS = ("uvicorn", "nextscale.serve")
TOLD_TO_CLIENTS = ("nextscale.pipeline", "nextscale.text.words")  # what they warn of is in answers
LEVELS = ("debug", "info", "warning", "error")
_Base: Any = AutoHTTPProtocol  # httptools where it is installed, else h11


def listen(host: str, port: int) -> socket.socket:
    """Take a port, so that the model is not loaded in vain; connections are accepted later."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise NextscaleError(f"{host!r} is not the name of this machine, nor one of its addresses") from None
    family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    taken = socket.socket(family, kind, proto)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise _cannot_listen(host, port, error) from None
    return taken


def _cannot_listen(host: str, port: int, error: OSError) -> NextscaleError:
    reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
    return NextscaleError(f"cannot listen on {host}:{port}: {reason}")


def is_loopback(taken: socket.socket) -> bool:
    """Whether only this machine reaches the port."""
    return ipaddress.ip_address(taken.getsockname()[0]).is_loopback


def serve(
    app: FastAPI,
    engine: Engine,
    taken: socket.socket,
    *,
    grace: float = 30.0,
    log_level: str = "warning",
    say: Callable[[str], None] = print,
) -> None:
    """Serve until a signal comes. `grace`: seconds in which accepted requests may end; `say` gets a line for the user
    now and then. Raises what the engine failed with, if it did."""
    log_to_stderr(log_level)
    DrainingServer(make_config(app, log_level), engine, grace, say).run(sockets=[taken])
    if engine.failure is not None:
        raise engine.failure
    if engine.is_alive:  # in what nothing interrupts, as the capture of graphs: a usual end would abort inside of torch
        os._exit(0)


def make_config(app: FastAPI, log_level: str) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",  # uvloop, which Ray brings, says nothing of a port that is taken
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=log_level in ("debug", "info"),
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=LAST_SECONDS,
    )


def log_to_stderr(level: str) -> None:
    """Write whole tracebacks: they are nowhere else."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    for name in TOLD_TO_CLIENTS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if level == "warning":
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of whatever a client sends


class DrainingServer(uvicorn.Server):
    """The first signal refuses new work and lets the engine finish; the second ends the process at once."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self.engine, self.grace, self.say = engine, grace, say
        self.asked_to_stop, self.announced = False, ""
        self.drainer = threading.Thread(target=engine.drain, args=(grace,), daemon=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Uvicorn's own would have the process killed by the signal in the end.
        if self.asked_to_stop:
            os.write(2, b"stopped\n")
            os._exit(STOPPED)
        self.asked_to_stop = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process listens by now
            raise _cannot_listen(*self._address(sockets), error) from None
        self.url = "http://{}:{}".format(*self._address(sockets))

    def _address(self, sockets: list[socket.socket] | None) -> tuple[str, int]:
        host, port = (sockets or [])[0].getsockname()[:2]
        return (f"[{host}]" if ":" in host else host), port

    async def on_tick(self, counter: int) -> bool:
        self.announce()
        if self.asked_to_stop and not self.drainer.ident:
            self.drainer.start()
        drained = self.drainer.ident is not None and not self.drainer.is_alive()
        if drained or self.engine.state == "failed":
            self.should_exit = True
        return await super().on_tick(counter)

    def announce(self) -> None:
        """Say what is new."""
        waiting = self.engine.waiting + self.engine.running
        line = {
            "loading": f"warming up; soon at {self.url}",
            "ready": f"ready at {self.url}",
            "draining": f"shutting down: {waiting} images are left, for at most {self.grace:g} s; again to stop now",
        }.get(self.engine.state)
        if line is not None and self.announced != self.engine.state:
            self.announced = self.engine.state
            self.say(line)


class GuardedProtocol(_Base):
    """A connection on which nobody can wait for ever, and whose errors look like all others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(ApiError(503, "too many connections are open", SERVER, "too_many_connections"))
            return
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # a request is at work
            self._stop_header_timer()
            self._header_bytes = 0
            return
        in_body = self.cycle is not None and self.cycle.more_body  # what is left of a refused one
        self._header_bytes += 0 if in_body else len(data)
        if self._header_bytes > MAX_HEADERS and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the headers are too large; allowed: {MAX_HEADERS} bytes", code="headers"))
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(self.transport.get_write_buffer_size(), self.loop.time() + READ_SECONDS)

    def _wait_for_reader(self, before: int, deadline: float) -> None:
        """Give up a client that took nothing for a while, or too little for long."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < before and self.loop.time() < deadline:
                self._wait_for_reader(left, deadline)
            else:
                self.transport.abort()

        self._write_timer = self.loop.call_later(WRITE_SECONDS, look)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self._refuse(ApiError(400, "this is no HTTP request", code="invalid_http"))
        self.transport.close()  # in the middle of an answer nothing else can be said

    def _refuse(self, error: ApiError) -> None:
        body = as_ascii(error.body)
        head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += f"x-request-id: req_{uuid.uuid4().hex}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode("ascii") + body)
        self.transport.close()
