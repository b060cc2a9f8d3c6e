"""Choosing a runtime, and what happens when the memory of the device runs out. What needs a GPU is in test_gpu.py."""

from __future__ import annotations

import copy
import logging
import weakref

import pytest
import torch
from support.emulated_graphs import EmulatedGraphs
from support.pipelines import ask, same_tokens

from nextscale.errors import NextscaleError
from nextscale.runtime.eager import Eager
from nextscale.runtime.out_of_memory import with_enough_memory
from nextscale.runtime.registry import make_executor


def test_an_unknown_runtime() -> None:
    with pytest.raises(NextscaleError, match="unknown runtime 'fast'; allowed: eager, compiled, graphs"):
        make_executor("fast", torch.device("cpu"))


def test_graphs_without_a_gpu(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert make_executor("graphs", torch.device("cpu")).name == "eager"
    assert "runtime graphs needs a CUDA GPU, not cpu; the images are made with runtime eager" in caplog.text


def test_padding_of_prompts_changes_nothing(any_pipe) -> None:
    plain = ask(any_pipe, 2)
    other = copy.copy(any_pipe)
    other.executor = make_executor("eager", any_pipe.device)
    other.executor.text_buckets = (64,)
    assert same_tokens(plain, ask(other, 2))


def test_a_second_try_has_the_memory_of_the_first(var) -> None:
    """What a failed try had allocated hangs on its traceback, until that is gone."""
    seen: list[weakref.ref] = []

    class Keeping(EmulatedGraphs):
        def forget_others(self) -> bool:
            return len(seen) == 1

    def make(executor):
        assert all(ref() is None for ref in seen)
        large = torch.zeros(10)
        seen.append(weakref.ref(large))
        if len(seen) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
        return type(executor)

    assert with_enough_memory(make, Keeping(), True, 1, var.schedule()) is Eager
    assert len(seen) == 3


class SmallMemory(EmulatedGraphs):
    """A device whose memory is too small for what it keeps."""

    def run_scale(self, call, batch, *rest):
        if batch.scale.index == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
        return super().run_scale(call, batch, *rest)


def test_out_of_memory(infinity, caplog) -> None:
    other = copy.copy(infinity)
    other.executor = SmallMemory()
    with caplog.at_level(logging.WARNING):
        found = ask(other, 2)
    assert same_tokens(ask(infinity, 2), found)
    assert found.trace.to_dict()["runtime"] == "eager"
    assert "too small for runtime graphs" in caplog.text
    assert other.executor.current is None
    sentence = r"ran out of memory for 2 images of \d+ tokens \(tried to allocate 2.50 gib\); allowed: fewer images"
    for once in ({"callback_on_scale_end": lambda end: None}, {"generator": torch.Generator(), "seed": None}):
        with pytest.raises(NextscaleError, match=sentence):
            ask(other, 2, **once)
