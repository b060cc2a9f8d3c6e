"""What the server does, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from nextscale.serve.engine import Engine
from nextscale.serve.observer import Observer

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
MILLISECONDS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
IMAGES = (1, 2, 4, 8, 16, 32, 64)


class Metrics(Observer):
    """What an engine tells, counted. Everything is in a registry of its own, so that a process may hold several."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        ProcessCollector(registry=r)  # the resident memory, among others
        self._queue_wait = Histogram(
            "nextscale_queue_wait_seconds", "Seconds that an image waited.", buckets=SECONDS, registry=r
        )
        self._batch_size = Histogram("nextscale_batch_size", "Images of a batch.", buckets=IMAGES, registry=r)
        self._scale = Histogram(
            "nextscale_scale_milliseconds",
            "Milliseconds that a batch spent on a scale.",
            ["model", "scale"],
            buckets=MILLISECONDS,
            registry=r,
        )
        self._image_seconds = Histogram(
            "nextscale_image_seconds", "Seconds from a request to its image.", buckets=SECONDS, registry=r
        )
        self._finished = Counter("nextscale_images_finished", "Images made.", ["model"], registry=r)
        self._tokens = Counter("nextscale_tokens_computed", "Tokens computed.", ["model"], registry=r)
        self._saved = Counter("nextscale_tokens_saved", "Tokens that a method left out.", ["model"], registry=r)
        self._canceled = Counter("nextscale_requests_canceled", "Requests whose client left.", registry=r)
        self._rejected = Counter("nextscale_requests_rejected", "Requests refused.", ["reason"], registry=r)
        self._failed = Counter("nextscale_requests_failed", "Requests that failed.", ["kind"], registry=r)
        self._previews = Counter("nextscale_previews_made", "Previews made.", registry=r)
        self._skipped = Counter("nextscale_previews_skipped", "Previews left out under load.", registry=r)

    def watch(self, engine: Engine) -> None:
        """Read from the engine at every scrape what nobody needs to count."""
        r, models = self.registry, engine.models.values()
        waiting = Gauge("nextscale_queue_length", "Images that wait.", registry=r)
        waiting.set_function(lambda: engine.waiting)
        running = Gauge("nextscale_images_running", "Images in the batch that runs.", registry=r)
        running.set_function(lambda: engine.running)
        ready = Gauge("nextscale_ready", "1 if requests are accepted.", registry=r)
        ready.set_function(lambda: engine.state == "ready")
        captured = Gauge("nextscale_graphs_captured", "Scales captured as CUDA graphs.", registry=r)
        captured.set_function(lambda: sum(model.pipe.captured for model in models))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def started(self, waits: Sequence[float]) -> None:
        self._batch_size.observe(len(waits))
        for seconds in waits:
            self._queue_wait.observe(seconds)

    def scale_done(self, model: str, scale: int, seconds: float) -> None:
        self._scale.labels(model, str(scale)).observe(1000 * seconds)

    def finished(self, model: str, tokens: int, tokens_plain: int, seconds: float) -> None:
        self._finished.labels(model).inc()
        self._tokens.labels(model).inc(tokens)
        self._saved.labels(model).inc(max(0, tokens_plain - tokens))
        self._image_seconds.observe(seconds)

    def canceled(self) -> None:
        self._canceled.inc()

    def failed(self, kind: str) -> None:
        self._failed.labels(kind).inc()

    def preview_made(self) -> None:
        self._previews.inc()

    def preview_skipped(self) -> None:
        self._skipped.inc()


def merge(expositions: Mapping[str, str]) -> str:
    """The metrics of several engines as one text, each sample with the label `replica`."""
    families: dict[str, list[str]] = {}
    for replica, text in sorted(expositions.items()):
        samples = families.setdefault("", [])
        for line in text.splitlines():
            if line.startswith("#"):
                kind, name, _ = line.removeprefix("# ").split(" ", 2)
                samples = families.setdefault(name, [])
                if kind in ("HELP", "TYPE") and line not in samples:
                    samples.append(line)
            elif line:
                name, brace, rest = line.partition("{")
                if not brace:
                    name, _, rest = line.partition(" ")
                    rest = f"}} {rest}"
                comma = "," if brace else ""
                samples.append(f'{name}{{replica="{replica}"{comma}{rest}')
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
