"""`nextscale serve --replicas` before Ray is started, and what ends it."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")

from support.commands import run

from nextscale.errors import NextscaleError
from nextscale.pipeline import Pipeline
from nextscale.serve.replicas import Stop, StopLoading
from nextscale.serve.setup import ServeOptions, find_models, sizes_of


def test_a_warm_size_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda *args, **more: pytest.fail("a model was loaded"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "ray" else find(name))
    monkeypatch.setitem(sys.modules, "ray", None)  # whoever imports it gets an error
    done = run("serve", "--replicas", "1", "--port", "0", "--device", "cpu", "--warm", "512x512,511x512")
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: --warm 511x512 is not a size of the model; allowed: 512x512, ")
    with pytest.raises(NextscaleError, match="--warm 511x512 is not a size"):
        ServeOptions(warm="511x512").resolved()


def test_sizes_of_a_model_that_is_not_loaded(embedded: Pipeline) -> None:
    from nextscale.serve.served_model import ServedModel

    (blueprint,) = find_models(()).values()
    assert sizes_of(blueprint) == ServedModel(embedded).sizes


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_signal_interrupts_the_loading_and_not_the_serving() -> None:
    stop = Stop()
    with pytest.raises(StopLoading):
        os.kill(os.getpid(), signal.SIGTERM)
    stop = Stop()
    stop.is_loading = False
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.asked.wait(5)
