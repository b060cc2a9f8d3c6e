"""Who is served next, and with whom. Nothing here knows a clock, a thread or a model, so it can be simulated."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Waiting(Generic[T]):
    item: T
    key: Hashable  # items of one key can be a batch
    since: float


class BatchQueue(Generic[T]):
    """A queue of single images, the oldest first. A batch is led by the oldest, so nobody starves; others that fit
    with it may pass those that do not, until one of these has waited for `age_limit` seconds."""

    def __init__(self, batch_wait: float, age_limit: float) -> None:
        """`batch_wait`: seconds for which a batch that is not full waits for others."""
        self.batch_wait, self.age_limit = batch_wait, age_limit
        self.entries: list[Waiting[T]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, item: T, key: Hashable, now: float) -> None:
        self.entries.append(Waiting(item, key, now))

    def remove(self, leaves: Callable[[T], bool]) -> list[T]:
        """Take out the items for which `leaves` is true."""
        gone = [e.item for e in self.entries if leaves(e.item)]
        self.entries = [e for e in self.entries if not leaves(e.item)]
        return gone

    def next_batch(self, now: float, max_batch: Callable[[T], int]) -> tuple[list[T], float | None]:
        """A batch to run now; or none, and after how many seconds to ask again (None: when something was added)."""
        if not self.entries:
            return [], None
        oldest = self.entries[0]
        limit, batch = max_batch(oldest.item), list[Waiting[T]]()
        for entry in self.entries:
            if entry.key == oldest.key:
                batch.append(entry)
                if len(batch) == limit:
                    break
            elif now - entry.since >= self.age_limit:
                break  # those behind it would keep it waiting for longer
        left = oldest.since + self.batch_wait - now
        if len(batch) < limit and left > 0:
            return [], left
        taken = set(map(id, batch))
        self.entries = [e for e in self.entries if id(e) not in taken]
        return [entry.item for entry in batch], None
