"""The engine: one thread owns the device and makes batches of what waits. It needs no HTTP:

engine = Engine([ServedModel.load("clipart")])
engine.start(wait=True)
images = engine.generate(ImageJob("clipart", "a red fox", seeds=(7,), method="nova:balanced"))
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nextscale.errors import NextscaleError, OutOfMemory, choices
from nextscale.io.devices import lost_device
from nextscale.serve.batch_run import BatchRun, EndRun
from nextscale.serve.batching import BatchQueue
from nextscale.serve.jobs import Canceled, Draining, Event, Failed, Finished, ImageJob, InvalidJob, NoMemory, QueueFull
from nextscale.serve.observer import Observer
from nextscale.serve.served_model import ServedModel
from nextscale.serve.ticket import Slot, Ticket

logger = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 32)  # that graphs are captured for; others are padded
LOADING_SECONDS = 5.0  # that an interrupted warm-up gets to end by itself
REFUSALS = {
    "loading": "the server is loading",
    "draining": "the server is shutting down",
    "stopped": "the server has shut down",
    "failed": "the server's device has failed",
}


@dataclass(frozen=True)
class Limits:
    max_batch: int = 8
    max_queue: int = 64  # images that wait
    batch_wait: float = 0.005  # seconds for which a batch that is not full waits for others
    age_limit: float = 2.0  # seconds after which an image is no longer passed by younger ones


class Engine:
    def __init__(
        self, models: Sequence[ServedModel], limits: Limits | None = None, observer: Observer | None = None
    ) -> None:
        names = [model.name for model in models]
        if not names or len(set(names)) < len(names):
            raise NextscaleError(f"an engine serves models of different names, not {choices(names) or 'none'}")
        self.models, self.default_model = {model.name: model for model in models}, models[0]
        for model in models:
            others = [other for other in models if other is not model and other.pipe is not model.pipe]
            model.other_bytes = sum(o.own_bytes for o in others if o.pipe.device == model.pipe.device)
        self.limits, self.observer = limits or Limits(), observer or Observer()
        self.state = "loading"  # "ready", "draining", "stopped", "failed"
        self.failure: Exception | None = None  # what the warm-up or the device died of
        self.running = 0  # images
        self._queue = BatchQueue[Slot](self.limits.batch_wait, self.limits.age_limit)
        self._changed = threading.Condition()
        self._aborting = False  # what runs shall end between two scales
        self._seconds_per_image = 1.0
        self._thread: threading.Thread | None = None

    # Called from any thread

    def start(self, warm_up: bool = True, wait: bool = False) -> None:
        """Begin to serve, behind a warm-up; `wait` for its end and raise what it failed with."""
        self._thread = threading.Thread(target=self._serve, args=(warm_up,), name="nextscale-engine", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: not wait or self.state != "loading")
        if wait and self.failure is not None:
            raise self.failure

    @property
    def waiting(self) -> int:
        """Images that wait."""
        return len(self._queue)

    def submit(self, job: ImageJob, on_event: Callable[[Event], None]) -> Ticket:
        """Accept a job or refuse it. `on_event` is called in the engine's thread, and must return at once."""
        if job.model not in self.models:
            raise NextscaleError(f"the model {job.model!r} is not served here; allowed: {choices(self.models)}")
        model, images = self.models[job.model], len(job.seeds)
        try:
            model.check(job)
            if not model.images_that_fit(model.size_of(job), self.limits.max_batch):
                raise InvalidJob("an image of this size does not fit into memory beside the other models", "size")
            if images > self.limits.max_queue:
                raise InvalidJob(f"{images} images at once are too many; allowed: {self.limits.max_queue}", "n")
        except NextscaleError:
            self.observer.rejected("invalid")
            raise
        ticket, key, now = Ticket(model, job, on_event, self.cancel), model.batch_key(job), time.monotonic()
        with self._changed:
            if self.state != "ready":
                self.observer.rejected(self.state)
                raise Draining(f"{REFUSALS[self.state]}; try again later")
            if len(self._queue) + images > self.limits.max_queue:
                self.observer.rejected("queue_full")
                raise QueueFull(len(self._queue), self._retry_after())
            for index in range(images):
                self._queue.add(Slot(ticket, index, now), key, now)
            self._changed.notify_all()
        return ticket

    def generate(self, job: ImageJob) -> list[Finished]:
        """Submit a job and wait for its images."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(job, events.put)
        done: list[Finished] = []
        while len(done) < len(job.seeds):
            event = events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                done.append(event)
        return sorted(done, key=lambda event: event.image_index)

    def cancel(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket.canceled or ticket.ended:
                return
            ticket.canceled = True
            left = self._queue.remove(lambda slot: slot.ticket is ticket)
        if len(left) == ticket.unfinished:  # none of its images runs
            self._end_canceled(ticket)

    def drain(self, timeout: float) -> bool:
        """Accept nothing more, finish what was accepted, and stop; whether nothing had to be cut off."""
        with self._changed:
            loading = self.state == "loading"  # so nothing was accepted
            if self.state in ("loading", "ready"):
                self.state = "draining"
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(LOADING_SECONDS if loading else timeout)
        if not self.is_alive:
            return True
        with self._changed:
            self._aborting = True
            self._changed.notify_all()
        self._thread.join(timeout=0 if loading else 60)  # for the scale that runs
        return False

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread is at work, or waits for it."""
        return self._thread is not None and self._thread.is_alive()

    def _retry_after(self) -> float:
        """Seconds until half of the queue is gone: then there is room for those who come back."""
        return min(max(len(self._queue) * self._seconds_per_image / 2, 0.05), 60.0)

    # The engine's thread

    def _serve(self, warms_up: bool) -> None:
        try:
            for model in self.models.values() if warms_up else ():
                self._warm_up(model)
        except EndRun:  # shut down before it was ready
            pass
        except Exception as error:
            logger.exception("the warm-up failed")
            self.failure = error
        with self._changed:
            if self.failure is not None:
                self.state = "failed"
            elif self.state == "loading":
                self.state = "ready"
            self._changed.notify_all()
        while self.failure is None and (batch := self._next_batch()):
            try:
                self._serve_batch(batch)
            except Exception as error:  # of the engine itself: nobody shall wait for a thread that is gone
                logger.exception("the engine failed")
                self.failure = error
                self._fail(batch, error)
            self.running = 0
        with self._changed:
            self.state = "stopped" if self.failure is None else "failed"
            left = self._queue.remove(lambda slot: True)
        self._fail(left, Draining(f"{REFUSALS[self.state]}; try again later"))

    def _serve_batch(self, batch: Sequence[Slot]) -> None:
        """Run those that somebody still waits for, and tell the others that they were given up."""
        slots = [slot for slot in batch if not slot.gone]
        if slots:
            begun = time.monotonic()
            self.observer.started([begun - slot.since for slot in slots])
            self._run(slots)
            self._seconds_per_image += 0.2 * ((time.monotonic() - begun) / len(slots) - self._seconds_per_image)
        for slot in batch:
            if slot.ticket.canceled:
                self._end_canceled(slot.ticket)

    def _warm_up(self, model: ServedModel) -> None:
        """Capture what calls will need, and make one image: a broken model shall never be called ready."""
        limit = self.limits.max_batch
        model.warm_up([n for n in BATCHES if n < limit] + [limit])
        job = ImageJob(model.name, 0 if model.takes_labels else model.sample_prompt, (0,), model.method, previews=3)
        ticket = Ticket(model, job, lambda event: None, self.cancel)
        begun = time.monotonic()
        BatchRun([Slot(ticket, 0, begun)], lambda: 0, 0, lambda: self.state != "loading", Observer())()
        self._seconds_per_image = time.monotonic() - begun

    def _next_batch(self) -> list[Slot]:
        """Wait for a batch; none means that there will be no more."""
        with self._changed:
            while not self._aborting:
                batch, wait = self._queue.next_batch(time.monotonic(), self._max_batch)
                if batch:
                    self.running = len(batch)
                    return batch
                if self.state == "draining" and not len(self._queue):
                    return []
                self._changed.wait(wait)
        return []

    def _max_batch(self, slot: Slot) -> int:
        model = slot.ticket.model
        return model.images_that_fit(model.size_of(slot.ticket.job), self.limits.max_batch)

    def _run(self, slots: Sequence[Slot]) -> None:
        """Run a batch; if it fails, in parts, so that only those images fail whose fault it is."""
        slots = [slot for slot in slots if not slot.gone]
        if not slots:
            return
        parts: list[list[Slot]] = []
        try:
            BatchRun(slots, lambda: self.waiting, self.limits.max_queue // 2, lambda: self._aborting, self.observer)()
        except EndRun:
            if self._aborting:
                self._fail(slots, Draining(f"{REFUSALS['draining']}; try again"))
        except Exception as error:
            self.failure = lost_device(slots[0].ticket.model.pipe.device)
            if len(slots) == 1 or self.failure is not None:
                self._fail(slots, error)
            else:
                size = len(slots) // 2 if is_out_of_memory(error) else 1
                parts = [slots[first : first + size] for first in range(0, len(slots), size)]
        for part in parts:  # now that the error is gone, which holds what the batch had allocated
            self._run(part)

    def _end_canceled(self, ticket: Ticket) -> None:
        ticket.send(Canceled(), self.observer.canceled)

    def _fail(self, slots: Sequence[Slot], error: Exception) -> None:
        if is_out_of_memory(error):
            error = NoMemory(str(error))
        elif not isinstance(error, NextscaleError):
            logger.error("a batch failed", exc_info=error)
        for slot in slots:
            slot.ticket.send(Failed(error), lambda: self.observer.failed(type(error).__name__))
        with self._changed:
            self._queue.remove(lambda slot: slot.gone)  # the other images of the same jobs


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (OutOfMemory, torch.OutOfMemoryError, MemoryError))
