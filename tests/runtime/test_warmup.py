"""A warm-up captures all that later calls need; batches are padded to one that was warmed up."""

from __future__ import annotations

import copy

import pytest
import torch
from support import behaviors
from support.emulated_graphs import EmulatedGraphs, emulated
from support.methods import CAPTURED
from support.pipelines import ask, same_tokens

from nextscale import NOVA, DropGuidance, FastVAR, RandomSelection, SparseVAR, ToProVAR
from nextscale.engine.rng import PerImageNoise
from nextscale.errors import NextscaleError
from nextscale.runtime.eager import Eager


@pytest.mark.parametrize("name", CAPTURED)
def test_batches_are_padded(infinity, name: str) -> None:
    behaviors.batches_are_padded(infinity, emulated(infinity), CAPTURED[name])


def test_batches_of_any_model_are_padded(any_pipe) -> None:
    behaviors.batches_are_padded(any_pipe, emulated(any_pipe), None)


def test_a_callback_sees_the_images_that_were_asked_for(infinity) -> None:
    """Not those that fill up a batch; and it may change them."""
    seen: list[list] = []

    def look(end):
        seen[-1].append((end.images, [len(t) for t in (end.features, end.tokens, end.logits)], len(end.raw_logits)))
        return end.features * 0.5 if end.scale.index == 2 else None

    found = []
    other = emulated(infinity)
    other.warm_up(["0.06M"], batches=[4], text_tokens=16, callbacks=True)
    for pipe in (infinity, other):
        seen.append([])
        found.append(ask(pipe, 3, callback_on_scale_end=look))
    assert seen[0] == seen[1]
    assert seen[0][0] == ((0, 1, 2), [3, 3, 3], 6)
    assert same_tokens(*found)


def test_what_batches_are_padded_to(infinity) -> None:
    """Only to what was warmed up, and to less than twice as many; each other size has graphs of its own."""
    other = emulated(infinity)

    def padded() -> list[int]:
        return [other.executor.padded_batch(n, other.backbone, PerImageNoise([0] * n), ()) for n in (1, 2, 3, 4, 5, 9)]

    assert padded() == [1, 2, 3, 4, 5, 9]
    other.warm_up(["0.06M"], batches=[2, 4], text_tokens=16)
    assert padded() == [2, 2, 4, 4, 5, 9]
    assert len(ask(other, 3, generator=torch.Generator(), seed=None).images) == 3  # eager, and drawn for three alone
    other.executor.forget()
    assert padded() == [1, 2, 3, 4, 5, 9]


WARM = {
    "plain": None,
    "nova": NOVA(t_est=2, alpha=0.0),
    "nova, previous": NOVA(t_est=2, alpha=0.0, probe="previous"),
    "nova and guidance": NOVA(t_est=2, alpha=0.3) + DropGuidance(4),
    "toprovar": ToProVAR(tau=0.3, a_max=0.9),
    "sparsevar": SparseVAR(start_scale=0.5, tau=0.9),
    "fastvar": FastVAR(scale_table="0.5:0.3 1:0.6"),
    "random selection": RandomSelection(NOVA(t_est=2, alpha=0.3)),
}


@pytest.mark.parametrize("name", WARM)
def test_after_a_warm_up_nothing_is_captured(any_pipe, name: str) -> None:
    """Whatever the prompts are, and whatever is decided for them."""
    other, eager = emulated(any_pipe), copy.copy(any_pipe)
    eager.executor = Eager()
    eager.executor.text_buckets = EmulatedGraphs.text_buckets  # longer texts are added up in another order
    size = {"pixel_budget": "0.06M"} if any_pipe.backbone.family == "infinity" else None
    assert other.warm_up([size], [WARM[name]], [1, 2], text_tokens=16) == other.captured > 0
    before = other.captured
    for first, images in ((0, 2), (2, 1), (4, 2), (6, 1), (8, 2)):
        expected, found = (ask(pipe, images, first=first, method=WARM[name]) for pipe in (eager, other))
        assert same_tokens(expected, found)
    assert other.captured == before
    assert other.warm_up([size], [WARM[name]], [1, 2], text_tokens=16) == 0


def test_a_warm_up_of_calls_with_a_callback(infinity) -> None:
    other = emulated(infinity)
    other.warm_up(["0.06M"], callbacks=True, text_tokens=16)
    before = other.captured
    ask(other, 1, callback_on_scale_end=lambda end: None)
    ask(other, 1, guidance_scale=2.0)
    assert other.captured == before
    assert infinity.warm_up(["0.06M"], text_tokens=16) == 0, "the eager runtime has nothing to capture"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": [3.0]}, "a size must be None, .height, width., .1M. or a dict of them, not 3.0"),
        ({"sizes": [{"hight": 3}]}, "a size has no 'hight'; allowed: height and width"),
        ({"methods": ["fast"]}, "fast"),
        ({"batches": [0]}, "batches"),
        ({"text_tokens": 0}, "text_tokens"),
        ({"callbacks": "yes"}, "callbacks"),
    ],
)
def test_bad_warm_ups(infinity, options, said: str) -> None:
    other = emulated(infinity)
    with pytest.raises(NextscaleError, match=said):
        other.warm_up(**options)
    assert other.captured == 0
