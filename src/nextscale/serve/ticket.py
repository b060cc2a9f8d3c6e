"""A job in the engine's hands, and its images."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from nextscale.serve.jobs import Event, Finished, ImageJob, Preview
from nextscale.serve.served_model import ServedModel

logger = logging.getLogger(__name__)


class Ticket:
    def __init__(
        self, model: ServedModel, job: ImageJob, on_event: Callable[[Event], None], on_cancel: Callable[[Ticket], None]
    ) -> None:
        self.model, self.job, self._on_event, self._on_cancel = model, job, on_event, on_cancel
        self.canceled = False  # nobody waits for it
        self.ended = False  # nothing follows
        self.unfinished = len(job.seeds)
        self._lock = threading.RLock()

    def cancel(self) -> None:
        """Give up the job: at once if it waits, between two scales if it runs."""
        self._on_cancel(self)

    def send(self, event: Event, count: Callable[[], None] = lambda: None) -> None:
        """Pass an event on, unless the job has ended or nobody wants it. `count` comes first: who has the answer finds
        it counted."""
        with self._lock:
            if self.ended or (self.canceled and isinstance(event, (Preview, Finished))):
                return
            count()
            if isinstance(event, Finished):
                self.unfinished -= 1
                self.ended = not self.unfinished
            elif not isinstance(event, Preview):
                self.ended = True
            try:
                self._on_event(event)
            except Exception:  # a listener's fault must not end the engine
                logger.exception("a listener failed")


@dataclass(eq=False)
class Slot:
    """One image of a job: what batches are made of."""

    ticket: Ticket
    index: int  # of the image in the job
    since: float  # when it was asked for
    previews: int = 0  # sent so far
    shown: int = 0  # the last scale that was shown: a batch that is run again shows none twice
    done: bool = False  # its image was sent

    @property
    def seed(self) -> int:
        return self.ticket.job.seeds[self.index]

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.done or self.ticket.canceled or self.ticket.ended
