"""The engine without HTTP, on a tiny model: every job ends once, whatever happens to it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from nextscale.errors import NextscaleError, OutOfMemory
from nextscale.pipeline import Pipeline
from nextscale.serve.batch_run import BatchRun
from nextscale.serve.engine import Engine, Limits
from nextscale.serve.jobs import Canceled, Draining, Event, Failed, Finished, ImageJob, NoMemory, Preview, QueueFull
from nextscale.serve.observer import Observer
from nextscale.serve.served_model import ServedModel
from nextscale.serve.ticket import Ticket
from nextscale.testing import tiny_var

METHODS = ("none", "truncate:2", "nova:t_est=2;alpha=0")


class Watching(Observer):
    def __init__(self) -> None:
        self.batches: list[int] = []
        self.rejections: list[str] = []
        self.errors: list[str] = []
        self.cancellations = self.skipped = self.scales = 0

    def started(self, waits) -> None:
        assert all(wait >= 0 for wait in waits)
        self.batches.append(len(waits))

    def rejected(self, reason: str) -> None:
        self.rejections.append(reason)

    def failed(self, kind: str) -> None:
        self.errors.append(kind)

    def canceled(self) -> None:
        self.cancellations += 1

    def scale_done(self, model: str, scale: int, seconds: float) -> None:
        self.scales += 1

    def preview_skipped(self) -> None:
        self.skipped += 1


class Client:
    """Collects the events of its jobs."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.events = engine, list[Event]()

    def send(self, prompt: int = 3, seeds: tuple[int, ...] = (1,), method: str = "none", **more) -> Ticket:
        return self.engine.submit(ImageJob("tiny-var", prompt, seeds, method, **more), self.events.append)

    def of(self, kind: type[Event]) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, *, ends: int) -> None:
        """Until so many images are finished or jobs failed or were canceled."""
        wait_until(lambda: len(self.events) - len(self.of(Preview)) >= ends)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


class Gate:
    """Holds the engine's thread inside a scale."""

    def __init__(self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached, self.calls = threading.Event(), threading.Event(), list[dict]()
        self.fault: Callable[[list], Exception | None] = lambda prompts: None
        call = type(pipe).__call__

        @functools.wraps(call)
        def held(pipe: Pipeline, prompt, **options):
            self.calls.append({"prompt": prompt, **options})
            self.reached.set()
            assert self.open.wait(20)
            if (error := self.fault(prompt)) is not None:
                raise error
            return call(pipe, prompt, **options)

        monkeypatch.setattr(type(pipe), "__call__", held)


@pytest.fixture
def pipe() -> Pipeline:
    return tiny_var()


@pytest.fixture
def start(pipe: Pipeline) -> Iterator[Callable[..., Engine]]:
    engines = []

    def begin(limits: Limits | None = None, observer: Observer | None = None, **options) -> Engine:
        engine = Engine([ServedModel(pipe, method="none")], limits, observer)
        engines.append(engine)
        engine.start(**options)
        wait_until(lambda: engine.state != "loading")
        return engine

    yield begin
    for engine in engines:
        engine.drain(20)


def alone(pipe: Pipeline, prompt: int, seed: int, method: str) -> np.ndarray:
    return np.asarray(pipe(prompt, seed=seed, method=method).images[0])


def test_images_are_those_of_the_pipeline(pipe, start) -> None:
    engine = start(Limits(max_batch=3))
    client = Client(engine)
    wanted = [(c, c * 7, METHODS[c % 3]) for c in range(9)]
    for prompt, seed, method in wanted:
        client.send(prompt, (seed, seed + 1), method)
    client.wait_for(ends=18)
    found = {(event.seed, event.method): event for event in client.of(Finished)}
    assert len(found) == 18
    for prompt, seed, method in wanted:
        for event in (found[seed, method], found[seed + 1, method]):
            expected = alone(pipe, prompt, event.seed, method).astype(int)
            assert np.abs(event.pixels().astype(int) - expected).max() <= 1
            plain = pipe.schedule().tokens
            assert event.tokens_plain == plain
            assert (event.tokens == plain) == (method == "none")
            assert event.seconds > 0
            assert event.queued >= 0
    assert {event.text_tokens for event in found.values()} == {0}


def test_generate_waits_for_all_images_in_order() -> None:
    engine = Engine([ServedModel(tiny_var(), method="none")])
    engine.start(wait=True)
    done = engine.generate(ImageJob("tiny-var", 5, (9, 4, 6)))
    assert [(event.image_index, event.seed) for event in done] == [(0, 9), (1, 4), (2, 6)]
    assert engine.drain(10)


def test_batches_are_of_one_kind_and_bounded(pipe, start, monkeypatch) -> None:
    watching = Watching()
    engine, gate = start(Limits(max_batch=4, age_limit=60), watching), Gate(pipe, monkeypatch)
    client = Client(engine)
    client.send(0)
    assert gate.reached.wait(20)
    for n in range(12):
        client.send(n % 10, (n,), METHODS[n % 2], guidance_scale=None if n % 3 else 1.5)
    gate.open.set()
    client.wait_for(ends=13)
    assert watching.batches == [1, 2, 4, 4, 2]
    for call in gate.calls:
        assert len(call["prompt"]) == len(call["seed"]) <= 4
    assert len(client.of(Finished)) == 13


def test_previews_come_in_order_before_the_image(start) -> None:
    client = Client(start())
    client.send(previews=2)
    client.send(previews="all", method="truncate:2")
    client.wait_for(ends=2)
    two, every = client.events[:3], client.events[3:]
    assert [type(event) for event in two] == [Preview, Preview, Finished]
    assert [event.index for event in two[:2]] == [0, 1]
    assert all(event.scale >= 4 and event.computed is None for event in two[:2])
    assert [event.scale for event in every[:-1]] == [1, 2, 3, 4, 5, 6]
    for event in every[:-1]:
        assert event.computed.shape == event.grid
        assert event.computed.min() == 255
    maps = every[-1].scales
    assert [m.scale for m in maps] == list(range(1, 9))
    assert [m.tokens for m in maps] == [1, 4, 9, 16, 25, 36, 0, 0]
    assert maps[-1].computed.max() == 0
    assert np.array_equal(every[-2].pixels(), every[-1].pixels())


def test_previews_are_small_where_others_wait_and_skipped_where_many_do(pipe, start, monkeypatch) -> None:
    watching = Watching()
    engine, gate = start(Limits(max_batch=1, max_queue=8), watching), Gate(pipe, monkeypatch)
    engine.default_model.scale_seconds[(16, 16), "none"] = [*[0.1] * 5, 99, 100, 0.1]  # so it is scale 6 that is shown
    client = Client(engine)
    for _ in range(8):
        client.send(previews=1)
    gate.open.set()
    client.wait_for(ends=8)
    assert watching.skipped == 3  # the queue was more than half full
    sides = [event.pixels().shape[0] for event in client.of(Preview)]
    assert sides == [8, 8, 8, 8, 16]
    client.send(previews="all")
    client.wait_for(ends=9)
    sides = [event.pixels().shape[0] for event in client.of(Preview)[5:]]
    assert sides == [8, 8, 8, 8, 16, 16, 16], "a grid of at most half the side has no more to show"


def test_a_full_queue_refuses_and_says_when_to_come_back(pipe, start, monkeypatch) -> None:
    watching = Watching()
    engine, gate = start(Limits(max_batch=1, max_queue=3), watching), Gate(pipe, monkeypatch)
    client = Client(engine)
    client.send()
    assert gate.reached.wait(20)
    for _ in range(3):
        client.send()
    with pytest.raises(QueueFull, match=r"^the queue is full: 3 images are waiting; try again in [0-9.]+ s$") as full:
        client.send()
    assert 0.05 <= full.value.retry_after <= 60
    with pytest.raises(QueueFull):
        client.send(seeds=(1, 2))
    assert watching.rejections == ["queue_full"] * 2
    gate.open.set()
    client.wait_for(ends=4)
    client.send()
    client.wait_for(ends=5)


def test_who_cancels_while_waiting_leaves_at_once(pipe, start, monkeypatch) -> None:
    watching = Watching()
    engine, gate = start(Limits(max_batch=1), watching), Gate(pipe, monkeypatch)
    client, other = Client(engine), Client(engine)
    client.send()
    assert gate.reached.wait(20)
    ticket = other.send(seeds=(1, 2, 3))
    ticket.cancel()
    ticket.cancel()
    assert other.events == [Canceled()]
    assert engine.waiting == 0
    gate.open.set()
    client.wait_for(ends=1)
    assert watching.cancellations == 1
    assert len(gate.calls) == 1


def test_who_cancels_while_running_leaves_at_the_next_scale(pipe, start) -> None:
    """The others of its batch go on; a batch that nobody waits for ends."""
    watching = Watching()
    engine = start(Limits(max_batch=2, batch_wait=5), watching)
    client, leaving = Client(engine), Client(engine)
    tickets: list[Ticket] = []

    def listen(event: Event) -> None:
        leaving.events.append(event)
        if isinstance(event, Preview) and event.scale == 3:
            tickets[0].cancel()

    tickets.append(engine.submit(ImageJob("tiny-var", 4, (1,), previews="all"), listen))
    client.send(3, previews="all")
    client.wait_for(ends=1)
    wait_until(lambda: Canceled() in leaving.events)
    assert [event.scale for event in leaving.of(Preview)] == [1, 2, 3]
    assert not leaving.of(Finished)
    expected = alone(pipe, 3, 1, "none").astype(int)
    assert np.abs(client.of(Finished)[0].pixels().astype(int) - expected).max() <= 1

    leaving.events.clear()
    scales = watching.scales
    job = ImageJob("tiny-var", 4, (1, 2), previews="all")
    tickets[0] = engine.submit(job, listen)
    wait_until(lambda: Canceled() in leaving.events)
    assert [event.scale for event in leaving.of(Preview)] == [1, 1, 2, 2, 3]
    assert watching.cancellations == 2
    assert watching.scales == scales, "the batch did not run to its end"


def test_a_failing_image_fails_alone(pipe, start, monkeypatch) -> None:
    watching = Watching()
    engine, gate = start(Limits(max_batch=4), watching), Gate(pipe, monkeypatch)
    gate.fault = lambda prompts: RuntimeError("planted") if 7 in prompts else None
    first, bad, good = Client(engine), Client(engine), Client(engine)
    first.send()
    assert gate.reached.wait(20)
    good.send(1)
    bad.send(7, (1, 2))
    good.send(2)
    gate.open.set()
    good.wait_for(ends=2)
    bad.wait_for(ends=1)
    assert len(good.of(Finished)) == 2
    assert [str(event.error) for event in bad.events] == ["planted"]
    assert watching.errors == ["RuntimeError"]
    good.send(4)
    good.wait_for(ends=3)


def test_out_of_memory_makes_batches_smaller(pipe, start, monkeypatch) -> None:
    engine, gate = start(Limits(max_batch=4)), Gate(pipe, monkeypatch)
    gate.fault = lambda prompts: OutOfMemory("too much") if len(prompts) > 1 or 7 in prompts else None
    first, bad, good = Client(engine), Client(engine), Client(engine)
    first.send()
    assert gate.reached.wait(20)
    for n in (1, 2, 3):
        good.send(n)
    bad.send(7)
    gate.open.set()
    good.wait_for(ends=3)
    bad.wait_for(ends=1)
    assert [len(call["prompt"]) for call in gate.calls] == [1, 4, 2, 1, 1, 2, 1, 1]
    assert len(good.of(Finished)) == 3
    assert isinstance(bad.events[0].error, NoMemory)


def test_a_failed_job_leaves_the_queue(pipe, start, monkeypatch) -> None:
    """So that what is left of it takes nobody's place in a batch."""
    engine, gate = start(Limits(max_batch=2, batch_wait=0.2)), Gate(pipe, monkeypatch)
    gate.fault = lambda prompts: RuntimeError("planted") if 7 in prompts else None
    bad, good = Client(engine), Client(engine)
    bad.send(7, (1, 2, 3))
    for n in (1, 2):
        good.send(n)
    gate.open.set()
    good.wait_for(ends=2)
    assert [str(event.error) for event in bad.events] == ["planted"]
    assert [call["prompt"] for call in gate.calls] == [[7, 7], [7], [1, 2]]


def test_a_batch_that_runs_again_shows_nothing_twice(start, monkeypatch) -> None:
    client, faults = Client(start(Limits(max_batch=2, batch_wait=5))), [RuntimeError("planted")]
    measure = BatchRun.measure

    def fail_once(run: BatchRun) -> None:
        if faults:
            raise faults.pop()
        measure(run)

    monkeypatch.setattr(BatchRun, "measure", fail_once)
    client.send(seeds=(1, 2), previews=2)
    client.wait_for(ends=2)
    assert len(client.of(Finished)) == 2
    for image in range(2):
        previews = [event for event in client.of(Preview) if event.image_index == image]
        assert [event.index for event in previews] == [0, 1]
        assert len({event.scale for event in previews}) == 2


def test_an_image_that_was_sent_is_not_sent_again(start, monkeypatch) -> None:
    client, faults = Client(start(Limits(max_batch=2, batch_wait=5))), [RuntimeError("planted")]
    finish = BatchRun.finish

    def fail_once(run: BatchRun, row: int, *rest) -> None:
        if row and faults:
            raise faults.pop()
        finish(run, row, *rest)

    monkeypatch.setattr(BatchRun, "finish", fail_once)
    client.send(seeds=(1, 2))
    client.wait_for(ends=2)
    assert [event.image_index for event in client.of(Finished)] == [0, 1]


def test_a_preview_that_fails_costs_no_image(start, monkeypatch) -> None:
    def fail(*_) -> None:
        raise RuntimeError("planted")

    watching = Watching()
    engine = start(observer=watching)
    monkeypatch.setattr("nextscale.serve.batch_run.decode_preview", fail)
    client = Client(engine)
    client.send(previews=2)
    client.wait_for(ends=1)
    assert [type(event) for event in client.events] == [Finished]
    assert (watching.skipped, watching.batches) == (2, [1])


def test_previews_are_small_where_others_of_the_batch_asked_for_none(start) -> None:
    engine = start(Limits(max_batch=2, batch_wait=5))
    engine.default_model.scale_seconds[(16, 16), "none"] = [*[0.1] * 5, 99, 100, 0.1]
    for others, side in ((1, 16), (0, 8)):
        client = Client(engine)
        client.send(previews=1)
        client.send(previews=others)
        client.wait_for(ends=2)
        assert {event.pixels().shape[0] for event in client.of(Preview)} == {side}


def test_who_cancels_just_before_the_run_is_told(pipe, start, monkeypatch) -> None:
    watching = Watching()
    engine, gate = start(Limits(max_batch=1), watching), Gate(pipe, monkeypatch)
    client, leaving = Client(engine), Client(engine)
    next_batch, tickets = engine._next_batch, list[Ticket]()

    def cancel_what_left_the_queue():
        batch = next_batch()
        if batch and tickets and batch[0].ticket is tickets[0]:
            tickets[0].cancel()
        return batch

    monkeypatch.setattr(engine, "_next_batch", cancel_what_left_the_queue)
    client.send()
    assert gate.reached.wait(20)
    tickets.append(leaving.send(5))
    gate.open.set()
    leaving.wait_for(ends=1)
    assert leaving.events == [Canceled()]
    assert (watching.cancellations, len(gate.calls)) == (1, 1)


def test_an_engine_that_fails_leaves_nobody_waiting(start) -> None:
    class Broken(Observer):
        def started(self, waits) -> None:
            raise RuntimeError("planted")

    engine = start(Limits(max_batch=1, batch_wait=0.2), Broken())
    client = Client(engine)
    client.send()
    client.wait_for(ends=1)
    assert [str(event.error) for event in client.of(Failed)] == ["planted"]
    wait_until(lambda: engine.state == "failed")
    with pytest.raises(Draining, match="device has failed"):
        client.send()


def test_a_listener_that_fails_harms_nobody(start) -> None:
    engine = start()
    engine.submit(ImageJob("tiny-var", 1, (1,), previews="all"), lambda event: 1 / 0)
    client = Client(engine)
    client.send()
    client.wait_for(ends=1)
    assert len(client.of(Finished)) == 1


def test_drain_finishes_what_was_accepted(pipe, start, monkeypatch) -> None:
    watching = Watching()
    engine, gate = start(Limits(max_batch=1), watching), Gate(pipe, monkeypatch)
    client, drained = Client(engine), list[bool]()
    for n in range(3):
        client.send(n)
    thread = threading.Thread(target=lambda: drained.append(engine.drain(20)))
    thread.start()
    wait_until(lambda: engine.state == "draining")
    with pytest.raises(Draining, match=r"^the server is shutting down; try again later$"):
        client.send()
    gate.open.set()
    thread.join(20)
    assert drained == [True]
    assert len(client.of(Finished)) == len(client.events) == 3
    assert engine.state == "stopped"
    assert watching.rejections == ["draining"]
    with pytest.raises(Draining, match="has shut down"):
        client.send()


def test_drain_cuts_off_what_takes_too_long(pipe, start, monkeypatch) -> None:
    engine, gate = start(Limits(max_batch=1)), Gate(pipe, monkeypatch)
    client = Client(engine)
    for n in range(3):
        client.send(n)
    assert gate.reached.wait(20)
    threading.Timer(0.3, gate.open.set).start()
    assert engine.drain(0.1) is False
    assert [str(event.error) for event in client.of(Failed)] == [
        "the server is shutting down; try again",
        *["the server has shut down; try again later"] * 2,
    ]
    assert len(client.events) == 3


def test_not_ready_before_its_warm_up_nor_after_one_that_failed(pipe, monkeypatch) -> None:
    gate = Gate(pipe, monkeypatch)
    engine = Engine([ServedModel(pipe, method="none")])
    engine.start()
    assert gate.reached.wait(20)
    assert engine.state == "loading"
    with pytest.raises(Draining, match=r"^the server is loading; try again later$"):
        Client(engine).send()
    gate.fault = lambda prompts: NextscaleError("the weights hold NaN")
    gate.open.set()
    wait_until(lambda: engine.state == "failed")
    assert str(engine.failure) == "the weights hold NaN"
    with pytest.raises(Draining, match="device has failed"):
        Client(engine).send()
    assert engine.drain(1)
    with pytest.raises(NextscaleError, match=r"^the weights hold NaN$"):
        Engine([ServedModel(pipe, method="none")]).start(wait=True)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (ImageJob("other", 1, (1,)), "the model 'other' is not served here; allowed: tiny-var"),
        (ImageJob("tiny-var", 1, ()), "a job needs a seed for each of its images, and has none"),
        (ImageJob("tiny-var", 1, tuple(range(65))), "65 images at once are too many; allowed: 64"),
        (ImageJob("tiny-var", 1, (1,), "truncate:8"), "truncate: k = 8 leaves nothing of a schedule of 8 scales"),
        (ImageJob("tiny-var", 10, (1,)), "a class label must be a whole number, from 0 to 9, not 10"),
        (ImageJob("tiny-var", 1, (1,), "novae"), "unknown method 'novae'; allowed: none, .*"),
        (ImageJob("tiny-var", 1, (1,), height=16, width=24), "tiny-var makes no images of size 24x16; allowed: 16x16"),
        (ImageJob("tiny-var", 1, (1,), negative_prompt="x"), ".* takes class labels, so it has no negative prompt .*"),
        (ImageJob("tiny-var", 1, (1,), guidance_scale=float("nan")), "guidance_scale must be .*"),
    ],
    ids=lambda value: "",
)
def test_refused_before_it_waits(start, job, message) -> None:
    watching = Watching()
    engine = start(observer=watching, warm_up=False)
    with pytest.raises(NextscaleError, match=f"^{message}$"):
        engine.submit(job, print)
    assert engine.waiting == 0
    assert not watching.batches


def test_models_have_different_names(pipe) -> None:
    with pytest.raises(NextscaleError, match="different names, not tiny-var, tiny-var"):
        Engine([ServedModel(pipe), ServedModel(pipe)])
    with pytest.raises(NextscaleError, match="different names, not none"):
        Engine([])


def test_many_clients_at_once_are_each_answered_once(start) -> None:
    """From eight threads, with cancellations in between."""
    engine = start(Limits(max_batch=4, max_queue=1000, batch_wait=0.001))
    clients = [Client(engine) for _ in range(8)]

    def use(number: int) -> None:
        for n in range(12):
            ticket = clients[number].send(n % 10, (n, n + 1), METHODS[(n + number) % 3], previews=n % 3)
            if n % 4 == number % 4:
                time.sleep(0.002 * (n % 5))
                ticket.cancel()

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert engine.drain(60)
    for client in clients:
        ends = len(client.of(Canceled)) + len(client.of(Finished)) / 2
        assert not client.of(Failed)
        assert 9 <= ends <= 12 + 3 / 2  # one that is canceled may have had one image before
