"""Who does a list of independent units of work: this process, or others that have a pipeline each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from nextscale.pipeline import Pipeline

U = TypeVar("U")
R = TypeVar("R")
Work = Callable[[Pipeline], Callable[[U], R]]  # begun on a worker's pipeline, it does one unit after another


class Workers(ABC):
    replicas: int  # pipelines at work
    device: str  # the type of theirs

    @abstractmethod
    def map(self, work: Work[U, R], units: Sequence[U], name: Callable[[U], str] = str) -> Iterator[tuple[int, R]]:
        """Yield the index of a unit and its result when it is done. Errors call a unit by its `name`."""

    def run(self, work: Work[U, R], units: Sequence[U], advance: Callable[[int], Any] = lambda step: None) -> list[R]:
        """Do all units and return the results in their order."""
        results: dict[int, R] = {}
        for index, result in self.map(work, units):
            results[index] = result
            advance(1)
        return [results[index] for index in range(len(units))]


class LocalWorkers(Workers):
    """This process, one unit after another."""

    replicas = 1

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe, self.device = pipe, pipe.device.type

    def map(self, work: Work[U, R], units: Sequence[U], name: Callable[[U], str] = str) -> Iterator[tuple[int, R]]:
        do = work(self.pipe)
        for index, unit in enumerate(units):
            yield index, do(unit)
