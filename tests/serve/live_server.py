"""Live servers in this process, and an engine that follows a script."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nextscale.serve import server
from nextscale.serve.app import create_app
from nextscale.serve.engine import Engine
from nextscale.serve.jobs import Event, Failed, Finished, ImageJob, Preview
from nextscale.serve.metrics import Metrics
from nextscale.serve.served_model import ServedModel
from nextscale.testing import tiny_var


@dataclass
class Live:
    """A server and what stands behind it."""

    url: str
    port: int
    engine: Any = None
    metrics: Metrics = field(default_factory=Metrics)
    server: Any = None

    def count(self, name: str, **labels: str) -> float:
        """The value of a metric now."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20.0) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


@contextlib.contextmanager
def running(engine: Any, metrics: Metrics | None = None, grace: float = 10.0, **options: Any) -> Iterator[Live]:
    """Serve an engine in a thread of this process."""
    metrics = metrics or Metrics()
    app = create_app(engine, metrics=metrics, **options)
    taken = server.listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    made = server.DrainingServer(server.make_config(app, "error"), engine, grace, lambda line: None)
    thread = threading.Thread(target=made.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    while not made.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Live(f"http://127.0.0.1:{port}", port, engine, metrics, made)
    finally:
        made.asked_to_stop = True
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def served(models: Sequence[ServedModel], **options: Any) -> Iterator[Live]:
    """Serve models with an engine of their own."""
    metrics = Metrics()
    engine = Engine(models, observer=metrics)
    engine.start(warm_up=False)
    while engine.state == "loading":
        time.sleep(0.01)
    with running(engine, metrics, **options) as live:
        yield live


@dataclass
class ScriptedEngine:
    """An engine that tells what a test wants to be told: events, exceptions that `submit` raises, pauses in seconds."""

    script: list[Any] = field(default_factory=list)
    state: str = "ready"
    jobs: list[ImageJob] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of submissions
    canceled: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0
    running: int = 0
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.default_model = ServedModel(tiny_var(), "small", "none")
        self.models = {"small": self.default_model}

    def submit(self, job: ImageJob, on_event: Callable[[Event], None]) -> ScriptedEngine:
        self.jobs.append(job)
        self.times.append(time.monotonic())
        if isinstance(self.script[0], Exception):
            raise self.script.pop(0)
        threading.Thread(target=self._tell, args=(on_event,), daemon=True).start()
        return self

    def _tell(self, on_event: Callable[[Event], None]) -> None:
        for step in self.script:
            if isinstance(step, float):
                self.canceled.wait(step)
            else:
                on_event(step)

    def cancel(self) -> None:
        self.canceled.set()

    def drain(self, timeout: float) -> bool:
        return True


PIXELS = np.zeros((16, 16, 3), dtype=np.uint8)
FINISHED = Finished(0, lambda: PIXELS, 7, "none", 10, 20, 1, 0.1, 0.0)
PREVIEW = Preview(0, 0, 4, 8, (4, 4), lambda: PIXELS, None, 0.05)


def broken_pixels() -> np.ndarray:
    raise RuntimeError("a secret of the server")


BROKEN = Finished(0, broken_pixels, 7, "none", 10, 20, 1, 0.1, 0.0)
FAULT = Failed(RuntimeError("a secret of the server"))
