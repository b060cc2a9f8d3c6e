"""An accepted request on its way back to the client: as one answer, or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nextscale.errors import NextscaleError
from nextscale.serve import protocol
from nextscale.serve.engine import Engine
from nextscale.serve.errors import ApiError, AsciiResponse, as_ascii, failure, refusal
from nextscale.serve.jobs import Canceled, Draining, Event, Failed, Finished, Preview
from nextscale.serve.limits import ClientGone
from nextscale.serve.protocol import CheckedRequest

KEEP_ALIVE = 15.0  # seconds without an event after which a comment is sent
MAX_UNREAD = 16  # previews that wait for a client; further ones are dropped, for it reads slower than they come
COMMENT = b": still here\n\n"
T = TypeVar("T")


class EventQueue:
    """Events that another thread puts in; reading them ends with `ClientGone` when nobody listens any more."""

    def __init__(self) -> None:
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Event | None]()
        self._unread = 0  # previews

    def put(self, event: Event) -> None:
        """Add an event, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all clients are gone
            self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: Event) -> None:
        if isinstance(event, Preview):
            if self._unread == MAX_UNREAD:
                return
            self._unread += 1
        self._queue.put_nowait(event)

    async def get(self, timeout: float | None = None) -> Event:
        event = await asyncio.wait_for(self._queue.get(), timeout)
        if event is None:
            raise ClientGone
        self._unread -= isinstance(event, Preview)
        return event

    @contextlib.asynccontextmanager
    async def watching(self, request: Request) -> AsyncIterator[None]:
        """Notice when the client closes its connection; the body must have been read."""
        watch = asyncio.create_task(self._watch(request))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(None)


class Answer:
    """What becomes of a request. Images are fetched from the device and encoded in threads of `encoders`."""

    def __init__(
        self, request: Request, asked: CheckedRequest, engine: Engine, encoders: anyio.CapacityLimiter
    ) -> None:
        self.request, self.asked, self.engine, self.encoders = request, asked, engine, encoders
        self.events = EventQueue()

    async def submit(self) -> None:
        """Hand the job to the engine, or tell the client why not."""
        try:
            self.ticket = await to_thread.run_sync(self.engine.submit, self.asked.job, self.events.put)
        except NextscaleError as error:
            raise refusal(error, self.engine.state) from None

    async def respond(self) -> Response:
        """Wait for all images."""
        done: dict[int, tuple[Finished, str]] = {}

        def as_text(event: Finished) -> str:
            return base64.b64encode(protocol.encode(self.asked, event)).decode("ascii")

        def respond() -> Response:
            finished, images = zip(*(done[n] for n in sorted(done)), strict=True)
            return AsciiResponse(protocol.images_response(self.asked, finished, images))

        async with self._canceling():
            while len(done) < self.asked.images:
                event = await self._next()
                if isinstance(event, Finished):
                    done[event.image_index] = event, await self._in_thread(as_text, event)
            return await self._in_thread(respond)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Tell what happens while it happens."""

        def as_event(event: Finished | Preview) -> bytes:
            image = protocol.encode(self.asked, event)
            if isinstance(event, Finished):
                return server_sent(protocol.completed(self.asked, event, image))
            return server_sent(protocol.partial_image(self.asked, event, image))

        left, shown = self.asked.images, Counter[int]()
        async with self._canceling():
            while left:
                try:
                    event = await self._next(KEEP_ALIVE)
                    if isinstance(event, Preview):  # numbered here, as some may have been dropped
                        event = dataclasses.replace(event, index=shown[event.image_index])
                        shown[event.image_index] += 1
                    chunk = await self._in_thread(as_event, event)
                    left -= isinstance(event, Finished)
                except asyncio.TimeoutError:
                    chunk = COMMENT
                except ClientGone:
                    return
                except Exception as error:
                    left, chunk = 0, server_sent_error(self._as_api_error(error))
                yield chunk

    async def _next(self, timeout: float | None = None) -> Finished | Preview:
        event = await self.events.get(timeout)
        if isinstance(event, Failed):
            raise self._as_api_error(event.error)
        if isinstance(event, Canceled):  # not by the client, who would be gone
            raise self._as_api_error(Draining("the job was given up; try again"))
        return event

    def _as_api_error(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        return failure(error, self.engine.state, self.request.state.request_id)

    @contextlib.asynccontextmanager
    async def _canceling(self) -> AsyncIterator[None]:
        """Give the job up when its client leaves, or whatever else ends the answer early."""
        async with self.events.watching(self.request):
            try:
                yield
            finally:
                self.ticket.cancel()

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await to_thread.run_sync(work, *arguments, limiter=self.encoders)


class EventStream(Response):
    """A response that is written while it comes about, and whose source is closed whatever happens."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        self.chunks = chunks
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self.chunks):
            async for chunk in self.chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def server_sent(content: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (content["type"].encode("ascii"), as_ascii(content))


def server_sent_error(error: ApiError) -> bytes:
    return b"event: error\ndata: %s\n\n" % as_ascii(error.body)
