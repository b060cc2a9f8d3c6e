"""A graph as several that follow each other, so that the device begins before the last is launched."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class GraphSegments:
    """CUDA graphs that follow each other. While the device runs one, the host launches the next."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.graphs: list[Any] = []
        self.ready_after = -1  # the segment behind which all that the host will read has been written
        self.ready_event = torch.cuda.Event()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record what is asked of the device meanwhile, instead of running it."""
        # Old graphs must not be collected now: their memory cannot be given back during a capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._begin()
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # the graph is of no use: its error would hide what went wrong
                    self._end()
                raise
            self._end()
        finally:
            if collects:
                gc.enable()

    def _begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self.pool)

    def _end(self) -> None:
        self.graphs[-1].capture_end()

    def split(self) -> None:
        """End this segment and begin the next."""
        self._end()
        self._begin()

    def mark_ready(self) -> None:
        """Split where all that the host will read has been written."""
        self.ready_after = len(self.graphs) - 1
        self.split()

    def replay(self) -> None:
        for n, graph in enumerate(self.graphs):
            graph.replay()
            if n == self.ready_after:
                self.ready_event.record()

    def wait(self) -> None:
        """Wait until the host can read what the newest replay wrote for it."""
        self.ready_event.synchronize()
