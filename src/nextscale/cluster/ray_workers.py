"""Workers on Ray: actors with a pipeline each. What they make goes into files; small results come back."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.util import ActorPool

from nextscale.cluster.environment import LOOPBACK, prepare
from nextscale.cluster.placement import as_options
from nextscale.cluster.workers import R, U, Work, Workers
from nextscale.errors import NextscaleError, first_line
from nextscale.io.devices import lost_device
from nextscale.pipeline import Pipeline

OBJECT_STORE = 10**8  # bytes of a cluster that is started here: images do not travel through it
MAX_FAILURES = 10  # units that may fail until the others are given up
INIT_DEATHS = 3  # workers in a row that may die while they load

Load = Callable[[], Pipeline]
Numbered = tuple[int, Any]  # a unit or a result, with the unit's index


@dataclass(frozen=True)
class Failure:
    """What became of a unit that raised an error."""

    message: str
    is_ours: bool  # no sentence for the user, but a fault
    details: str


@dataclass(frozen=True)
class Unusable:
    """Why a worker can do nothing at all."""

    message: str


@contextlib.contextmanager
def connected(address: str) -> Iterator[list[Mapping[str, float]]]:
    """Join a cluster, or start one on this machine that ends with this process; yields the resources of its nodes."""
    prepare()
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "_node_ip_address": LOOPBACK}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise NextscaleError(f"the cluster at {address!r} cannot be joined: {reason}") from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield [node["Resources"] for node in ray.nodes() if node["Alive"]]
    finally:
        ray.shutdown()


class PipelineActor:
    """A worker: it loads the pipeline once. What the user can help it with keeps it from its work, not from being
    there: of an actor that cannot be made, Ray has a traceback only."""

    def __init__(self, load: Load) -> None:
        self.unusable: Unusable | None = None
        try:
            self.pipe = load()
            self.pipe.progress_bar = False
        except NextscaleError as error:
            self.unusable = Unusable(str(error))

    def do(self, work: Work[Any, Any], index: int, unit: Any) -> Numbered:
        return index, self.unusable or attempt(lambda unit: work(self.pipe)(unit), unit, self.pipe)

    def ping(self) -> None: ...


class DataActor(PipelineActor):
    """The same as Ray Data wants it: rows in, rows out."""

    def __init__(self, load: Load, work: Work[Any, Any]) -> None:
        super().__init__(load)
        self.work: Any = None
        try:
            if self.unusable is None:
                self.work = work(self.pipe)
        except NextscaleError as error:
            self.unusable = Unusable(str(error))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        results = [self.unusable or attempt(self.work, pickle.loads(unit), self.pipe) for unit in rows["unit"]]
        return {"index": rows["index"], "result": [cloudpickle.dumps(result) for result in results]}


class RayDataWorkers(Workers):
    """One pass over many units, by Ray Data. A worker that dies is started again, and its unit done again."""

    def __init__(self, load: Load, replicas: int, needs: Mapping[str, float], device: str = "cpu") -> None:
        self.load, self.replicas, self.options, self.device = load, replicas, as_options(needs), device

    def map(self, work: Work[U, R], units: Sequence[U], name: Callable[[U], str] = str) -> Iterator[tuple[int, R]]:
        if not units:
            return
        rows = [{"index": index, "unit": cloudpickle.dumps(unit)} for index, unit in enumerate(units)]
        most = min(self.replicas, len(units))
        data = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            DataActor,
            batch_size=1,
            # An idle worker leaves, so that one whose node has gone finds a place.
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most, initial_size=most),
            fn_constructor_args=(self.load, work),
            **self.options,
        )
        data.context.enable_progress_bars = data.context.print_on_execution_start = False
        data.context.max_consecutive_actor_init_deaths = INIT_DEATHS
        done = ((row["index"], pickle.loads(row["result"])) for row in data.iter_rows())
        yield from without_failures(done, units, name)


class RayActorWorkers(Workers):
    """Several passes over few units: workers stay from one pass to the next, and those that are left go on when one
    dies."""

    def __init__(self, load: Load, replicas: int, needs: Mapping[str, float], device: str = "cpu") -> None:
        self.replicas, self.device = replicas, device
        actor = ray.remote(**as_options(needs))(PipelineActor)
        self.actors = [actor.remote(load) for _ in range(replicas)]

    def map(self, work: Work[U, R], units: Sequence[U], name: Callable[[U], str] = str) -> Iterator[tuple[int, R]]:
        yield from without_failures(self._done(ray.put(work), dict(enumerate(units))), units, name)

    def _done(self, work: Any, left: dict[int, Any]) -> Iterator[Numbered]:
        while left:
            pool = ActorPool(self.actors)
            try:
                for done in pool.map_unordered(lambda actor, unit: actor.do.remote(work, *unit), list(left.items())):
                    del left[done[0]]
                    yield done
            except RayActorError as error:
                self.actors = [actor for actor in self.actors if is_alive(actor)]
                if not self.actors:
                    raise NextscaleError(f"all workers died: {first_line(error)}") from None


def is_alive(actor: Any) -> bool:
    try:
        ray.get(actor.ping.remote())
    except RayActorError:
        return False
    return True


def attempt(do: Callable[[Any], Any], unit: Any, pipe: Pipeline) -> Any:
    """The result, or `Failure`: an error must not end the other units. A worker whose GPU is lost dies, or all that are
    left would fail there, too; another one does the unit."""
    try:
        return do(unit)
    except Exception as error:
        if lost_device(pipe.device) is not None:
            os._exit(1)
        is_ours = not isinstance(error, NextscaleError)
        message = f"{type(error).__name__}: {error}" if is_ours else str(error)
        return Failure(message, is_ours, traceback.format_exc())


def without_failures(done: Iterable[Numbered], units: Sequence[U], name: Callable[[U], str]) -> Iterator[Numbered]:
    """Pass results on; when all are there, or too many have failed, raise an error that names the failures. A worker
    that can do nothing ends them all."""
    failed: dict[int, Failure] = {}
    for index, result in done:
        if isinstance(result, Unusable):
            raise NextscaleError(f"a worker cannot begin: {result.message}")
        if not isinstance(result, Failure):
            yield index, result
            continue
        failed[index] = result
        if len(failed) == MAX_FAILURES:
            break
    if not failed:
        return
    named = "; ".join(f"{name(units[index])}: {failure.message}" for index, failure in sorted(failed.items())[:3])
    more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
    sentence = f"{len(failed)} of {len(units)} parts failed: {named}{more}"
    ours = next((failure for failure in failed.values() if failure.is_ours), None)
    if ours is None:
        raise NextscaleError(sentence)
    raise RuntimeError(f"{sentence}\n{ours.details}")
