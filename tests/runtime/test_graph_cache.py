"""Which graphs calls share, and which leave when there are many or memory is scarce."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from support import behaviors
from support.emulated_graphs import EmulatedGraphs, emulated
from support.methods import SHAPES
from support.pipelines import ask, same_tokens

from nextscale import NOVA, DropGuidance, RandomSelection, ToProVAR
from nextscale.runtime.cudagraph.executor import CUDAGraphExecutor
from nextscale.testing import tiny_infinity


def close(a, b) -> bool:
    """Equal, but for the last digits of numbers: padding changes the order in which they are added."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == pytest.approx(b, abs=1e-5) if isinstance(a, float) else a == b


def test_only_callbacks_need_graphs_that_keep_features(infinity) -> None:
    """Only a callback looks at the maps between two scales, and has graphs of its own."""
    other = copy.copy(infinity)
    other.executor = graphs = EmulatedGraphs()
    other.progress_bar = None
    ask(other, 1)
    assert not any(key.watched for key in graphs.current.scales)
    ask(other, 1, callback_on_scale_end=lambda end: None)
    assert any(key.watched for key in graphs.current.scales)


def test_forgotten_graphs_are_gone(infinity) -> None:
    """When memory runs out, eager mode has to find it."""
    other = copy.copy(infinity)
    other.executor = graphs = EmulatedGraphs()
    made = ask(other, 1)  # nobody asks what its scales report
    known = [weakref.ref(captured.graph) for _, captured in graphs.replayed]
    assert len(known) == len(made.tokens)
    del made
    graphs.forget()
    gc.collect()
    assert not any(graph() for graph in known)


def test_graphs_of_several_call_shapes_coexist(var, monkeypatch) -> None:
    monkeypatch.setattr("nextscale.runtime.cudagraph.executor.MAX_CALL_SHAPES", len(SHAPES))
    other = copy.copy(var)
    other.executor = graphs = EmulatedGraphs()
    for round_ in range(2):
        for options in SHAPES:
            expected, found = (ask(pipe, 1, first=round_, output_type="latent", **options) for pipe in (var, other))
            assert same_tokens(expected, found)
        if not round_:
            recorded = graphs.captured
    assert graphs.captured == recorded
    assert len(graphs.cache) == len(SHAPES)
    assert len(graphs.arena.chunks) == 1, "they share their memory"
    ask(other, 2, output_type="latent")  # one more: the first, which was not used for longest, leaves
    ask(other, 1, output_type="latent", **SHAPES[2])
    assert graphs.captured == recorded + len(found.tokens)
    ask(other, 1, output_type="latent", **SHAPES[0])
    assert graphs.captured == recorded + 2 * len(found.tokens)


def test_graphs_are_evicted_when_memory_is_scarce(var, monkeypatch) -> None:
    other = copy.copy(var)
    other.executor = graphs = EmulatedGraphs()
    for options in SHAPES[:3]:
        ask(other, 1, output_type="latent", **options)
    expected, tries, capture = ask(var, 2), [], graphs.recorder.capture_conditioning

    def capture_conditioning(call, buffers):
        tries.append(len(graphs.cache))
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
        return capture(call, buffers)

    monkeypatch.setattr(graphs.recorder, "capture_conditioning", capture_conditioning)
    assert same_tokens(expected, ask(other, 2))
    assert tries == [3, 0]
    assert len(graphs.cache) == 1
    assert not graphs.reason
    monkeypatch.setattr("nextscale.runtime.cudagraph.executor.is_scarce", lambda device: True)
    ask(other, 1, output_type="latent")
    assert len(graphs.cache) == 1


@pytest.mark.parametrize("probe", ["lens", "previous"])
def test_images_reduced_from_different_scales_share_graphs(infinity, probe: str, monkeypatch) -> None:
    stars: list[int] = []  # of the images of a call: the scale behind which they are reduced

    def ratio(self, growth, t: int) -> float:
        star = stars[next(n for n, g in enumerate(self.growth) if g is growth)]
        return 0.5 if t > star else 0.0

    monkeypatch.setattr("nextscale.methods.nova.policy.NOVAPolicy._ratio", ratio)
    method, other = NOVA(t_est=2, probe=probe), copy.copy(infinity)
    other.executor = graphs = EmulatedGraphs()
    captured = []
    for stars[:] in ([5, 5], [3, 3], [3, 5], [5, 3], [3, 3]):  # after the first call caches are as large as need be
        expected, found = (ask(pipe, 2, method=method) for pipe in (infinity, other))
        assert same_tokens(expected, found)
        assert close(expected.trace.to_dict()["images"], found.trace.to_dict()["images"])
        captured.append(len(graphs.current.scales))
    assert captured[1] < captured[2], "a complete image among the others may run other code"
    assert captured[2:] == [captured[2]] * 3, "but not another one instead of it"


def test_prompts_of_any_length() -> None:
    pipe = tiny_infinity(text_length=128)
    other = emulated(pipe)
    other.executor.text_buckets = CUDAGraphExecutor.text_buckets
    behaviors.prompts_of_any_length(pipe, other)


@pytest.mark.parametrize(
    ("method", "like", "unlike"),
    [
        (NOVA(t_est=2, alpha=10), NOVA(t_est=2, alpha=5, tau=0.7, lam=0.2), NOVA(t_est=2, alpha=10, probe="lens")),
        (RandomSelection(NOVA(t_est=2, alpha=10)), RandomSelection(NOVA(t_est=2, alpha=10), seed=3), NOVA(t_est=2)),
        (ToProVAR(tau=0.3, a_max=0.9), ToProVAR(tau=0.35, a_max=0.9), ToProVAR(tau=0.3, a_max=0.8)),
    ],
    ids=["nova", "random", "toprovar"],
)
def test_methods_with_the_same_graph_key_share_graphs(infinity, method, like, unlike) -> None:
    other = emulated(infinity)
    recorded = []
    for m in (method, method, method, like, method, unlike):
        expected, found = (ask(pipe, 1, method=m, output_type="latent") for pipe in (infinity, other))
        assert behaviors.same(expected, found), m
        recorded.append(other.executor.captured)
    assert recorded[2:5] == [recorded[1]] * 3
    assert recorded[5] > recorded[4]
    assert len(other.executor.cache) == 2


def test_host_only_methods_share_graphs(infinity) -> None:
    """Only scales whose rows differ are: those without guidance."""
    nova, other = NOVA(t_est=2, alpha=10), emulated(infinity)
    recorded = []
    for method in (nova, nova, nova + DropGuidance(6), nova + DropGuidance(7), nova + DropGuidance(6), nova):
        expected, found = (ask(pipe, 1, method=method, output_type="latent") for pipe in (infinity, other))
        assert behaviors.same(expected, found), method
        recorded.append(other.executor.captured)
    assert len(other.executor.cache) == 1
    assert [b - a for a, b in pairwise(recorded)] == [0, 2, 1, 0, 0]
