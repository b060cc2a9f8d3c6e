"""CUDA graphs, emulated on any device, give what the eager runtime gives. What needs a GPU is in test_gpu.py."""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support import behaviors
from support.emulated_graphs import EmulatedGraph, EmulatedGraphs, emulated
from support.methods import CAPTURED
from support.pipelines import ask, same_tokens

from nextscale import NOVA, DropGuidance, FastVAR, SkipVAR, SparseVAR, ToProVAR, Truncate
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import PlainPolicy, Policy, PolicyContext
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var


def close(a, b) -> bool:
    """Equal, but for the last digits of numbers: padding changes the order in which they are added."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == pytest.approx(b, abs=1e-5) if isinstance(a, float) else a == b


def test_graphs_read_and_write_static_buffers(any_pipe) -> None:
    """Calls that replay what another call recorded, with other seeds and prompts."""
    other = copy.copy(any_pipe)
    other.executor = graphs = EmulatedGraphs()
    scales = len(ask(any_pipe, 2).tokens)
    for first in (0, 2, 0):
        expected, found = ask(any_pipe, 2, first=first), ask(other, 2, first=first)
        assert same_tokens(expected, found)
        assert expected.trace.to_dict()["images"] == found.trace.to_dict()["images"]
        a, b = (np.array(made.images[0], dtype=int) for made in (expected, found))
        assert abs(a - b).max() <= 1, "the decoder rounds differently"
    assert graphs.captured == scales
    for method in (DropGuidance(3), Truncate(1)):
        for first in (0, 2):
            assert same_tokens(ask(any_pipe, 2, first=first, method=method), ask(other, 2, first=first, method=method))
    assert graphs.captured == 2 * scales - 2, "rows without guidance have graphs of their own"
    assert same_tokens(ask(any_pipe, 1), ask(other, 1)), "another shape, other graphs"


@pytest.mark.parametrize("method", [NOVA(t_est=4, alpha=10), NOVA(t_est=4, alpha=10) + Truncate(1)])
def test_complete_scales_never_wait_for_a_report(infinity, monkeypatch, method) -> None:
    """Nothing depends on what the first scales report, so the device never idles behind them."""
    happened = []
    replay, wait = EmulatedGraph.replay, EmulatedGraph.wait
    monkeypatch.setattr(EmulatedGraph, "replay", lambda self: (happened.append("replay"), replay(self)))
    monkeypatch.setattr(EmulatedGraph, "wait", lambda self: (happened.append("wait"), wait(self)))
    other = copy.copy(infinity)
    other.executor = EmulatedGraphs()
    for first in (0, 2):
        happened.clear()
        ask(other, 1, first=first, method=method).trace.to_dict()  # no report is left for the next call to read
        assert happened[:4] == ["replay"] * 4
        assert happened[4] == "wait", "the fifth scale is decided by the four before"


class Uncapturable(NOVA):
    """A method that does not declare that its scales can be captured."""

    def start(self, context: PolicyContext) -> Policy:
        policy = super().start(context)
        policy.capabilities = dataclasses.replace(policy.capabilities, graph_key=None)
        return policy


def test_uncapturable_calls_run_eagerly(any_pipe) -> None:
    other = copy.copy(any_pipe)
    other.executor = graphs = EmulatedGraphs()
    for options in (
        {"method": Uncapturable(t_est=2, alpha=10)},
        {"generator": torch.Generator().manual_seed(3), "seed": None},
        {"force_tokens": ask(any_pipe, 2).tokens[:2]},
    ):
        if "generator" in options:
            expected = ask(any_pipe, 2, generator=torch.Generator().manual_seed(3), seed=None)
        else:
            expected = ask(any_pipe, 2, **options)
        assert same_tokens(expected, ask(other, 2, **options))
    assert graphs.captured == 0


@pytest.mark.parametrize("name", CAPTURED)
def test_methods_prune_the_same_tokens_in_graphs(any_pipe, name: str) -> None:
    method, other = CAPTURED[name], copy.copy(any_pipe)
    other.executor = graphs = EmulatedGraphs()
    for first in (0, 2, 4, 0):
        expected, found = (ask(pipe, 2, first=first, method=method) for pipe in (any_pipe, other))
        assert same_tokens(expected, found)
        assert close(expected.trace.to_dict()["images"], found.trace.to_dict()["images"])
        kept = [[r.trace.kept(1, len(r.tokens), layer) for layer in (1, 2)] for r in (expected, found)]
        assert np.array_equal(*kept)
        with torch.inference_mode():
            for chunk in graphs.arena.chunks:
                chunk.fill_(255)  # NaN in any format: a decoder may leave that in the caches
    assert graphs.captured, graphs.reason


@pytest.mark.parametrize("name", ["nova", "nova, early", "nova, previous", "fastvar", "sparsevar", "toprovar"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
def test_features_that_are_not_finite(any_pipe, name: str, captured: bool) -> None:
    """Methods decide from numbers that are not; what the user reads is what is wrong."""
    pipe = copy.copy(any_pipe)
    if captured:
        pipe.executor = EmulatedGraphs()

    def spoil(end):
        return torch.full_like(end.features, torch.nan) if end.scale.index == 4 else None

    with pytest.raises(NextscaleError, match="logits of scale 6 are not finite"):
        ask(pipe, 2, method=CAPTURED[name], callback_on_scale_end=spoil)


@dataclass(frozen=True)
class InactiveImages(Method):
    """The first image skips the fourth scale and stops before the last, or every image skips one scale; with another
    method's reduction."""

    name, summary = "inactive_images", ""
    like: Method | None = None
    skip_all: int | None = None  # the scale that every image skips, from 0

    def start(self, context):
        policy = PlainPolicy(context) if self.like is None else self.like.start(context)
        inner = policy.plan_scale

        def plan_scale(scale):
            plan = inner(scale)
            if self.skip_all is not None:
                return plan._replace(actions=("skip" if scale.index == self.skip_all else "run",) * context.images)
            first = {3: "skip", len(context.schedule) - 1: "stop"}.get(scale.index, "run")
            return plan._replace(actions=(first, *["run"] * (context.images - 1)))

        policy.plan_scale = plan_scale
        return policy


@pytest.mark.parametrize("like", [None, NOVA(t_est=2, alpha=10, uncomputed="nothing")])
def test_inactive_images(any_pipe, like) -> None:
    other = copy.copy(any_pipe)
    other.executor = graphs = EmulatedGraphs()
    # All these calls share their buffers, and must not take each other's graphs.
    some, fourth, sixth = (InactiveImages(like, skip_all=n) for n in (None, 3, 5))
    for first, method in ((0, some), (0, fourth), (2, like), (2, some), (2, fourth), (0, sixth), (2, like), (0, some)):
        assert same_tokens(*(ask(p, 2, first=first, method=method) for p in (any_pipe, other))), method
    assert graphs.captured


def test_what_a_callback_keeps_is_not_overwritten(any_pipe) -> None:
    other = copy.copy(any_pipe)
    other.executor = EmulatedGraphs()
    kept = {any_pipe: [], other: []}
    for pipe, ends in kept.items():
        for first in (0, 2):
            ask(pipe, 2, first=first, callback_on_scale_end=ends.append)
    for a, b in zip(*kept.values(), strict=True):
        for name in ("features", "tokens", "logits", "raw_logits", "hidden"):
            assert torch.allclose(getattr(a, name).float(), getattr(b, name).float(), atol=1e-4), name
        assert torch.allclose(a.decode(), b.decode(), atol=1e-4)


def test_skipvar_sees_two_different_previews(infinity, tmp_path) -> None:
    stage = {"classes": [0, 1, 2], "mean": [0.0, 0.0], "scale": [1.0, 1.0], "intercept": [0.0, 0.0, 0.0]}
    stage["coef"] = [[-1000.0, 0.0], [0.0, 0.0], [1000.0, 0.0]]  # skips scales where the image still changes
    decision = tmp_path / "decision.json"
    decision.write_text(json.dumps({"skip": stage}))
    method, other = SkipVAR(str(decision), at=0.5), copy.copy(infinity)
    other.executor = graphs = EmulatedGraphs()
    for first in (0, 2):
        expected, found = (ask(pipe, 2, first=first, method=method) for pipe in (infinity, other))
        assert same_tokens(expected, found)
        assert expected.trace.policy.features[0][0] > 0
        assert found.trace.policy.features[0] == pytest.approx(expected.trace.policy.features[0], rel=1e-3)
    assert graphs.captured


def test_a_callback_may_change_the_features_of_graphs(any_pipe) -> None:
    other = copy.copy(any_pipe)
    other.executor = EmulatedGraphs()
    double = {"callback_on_scale_end": lambda end: end.features * 1.5 if end.scale.index == 2 else None}
    for _ in range(2):
        assert same_tokens(ask(any_pipe, 2, **double), ask(other, 2, **double))


def test_settings_are_those_of_the_call(any_pipe) -> None:
    behaviors.settings_are_those_of_the_call(any_pipe, emulated(any_pipe))


def test_numbers_are_uploaded(any_pipe) -> None:
    behaviors.numbers_are_uploaded(any_pipe, emulated(any_pipe))


def test_settings_are_those_of_the_call_of_a_method(infinity) -> None:
    method = NOVA(t_est=2, alpha=10, entropy_of="guided")
    behaviors.settings_are_those_of_the_call(infinity, emulated(infinity), method)


@pytest.mark.parametrize("kind", [NOVA, SparseVAR, ToProVAR])
def test_methods_are_those_of_the_call(infinity, kind) -> None:
    methods = [m for m in CAPTURED.values() if isinstance(m, kind)]
    more = {
        NOVA: [
            NOVA(t_est=2, alpha=10, **given)
            for given in ({"lam": 1.0}, {"scale_linkage": False}, {"max_layer_keep": 0.4})
        ],
        SparseVAR: [SparseVAR(start_scale=0.5, tau=0.95)],
        ToProVAR: [ToProVAR(**{"tau": 0.3, "a_max": 0.9, **given}) for given in ({"center": False}, {}, {"tau": 0.9})],
    }
    methods = [*methods[:5], *more[kind]]
    behaviors.methods_are_those_of_the_call(infinity, emulated(infinity), methods)


@pytest.mark.parametrize("name", [None, "nova", "sparsevar"])
def test_an_old_output_stays(infinity, name) -> None:
    behaviors.an_old_output_stays(infinity, emulated(infinity), name and CAPTURED[name])


@pytest.mark.parametrize("make", [tiny_var, tiny_infinity, tiny_hart])
def test_infinite_logits_are_noticed(make) -> None:
    behaviors.infinite_logits_are_noticed(emulated(make()))


@pytest.mark.parametrize("how", [None, *behaviors.LEAVING])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
def test_what_a_callback_keeps_stays(infinity, how, captured: bool) -> None:
    method = how and behaviors.Leaving(**behaviors.LEAVING[how])
    behaviors.what_a_callback_keeps_stays(emulated(infinity) if captured else infinity, method)


@pytest.mark.parametrize("like", [None, behaviors.REDUCED], ids=["plain", "nova"])
@pytest.mark.parametrize("how", behaviors.LEAVING)
def test_images_that_leave(infinity, how: str, like) -> None:
    again = behaviors.images_that_leave(infinity, emulated(infinity), behaviors.LEAVING[how], like)
    assert again == 0, "calls like earlier ones find their graphs"


@pytest.mark.parametrize("like", [None, behaviors.REDUCED], ids=["plain", "nova"])
def test_images_that_a_callback_lets_go(infinity, like) -> None:
    behaviors.images_that_a_callback_lets_go(infinity, emulated(infinity), like)


@pytest.mark.parametrize(
    "like", [NOVA(t_est=2, alpha=0.0), FastVAR(scale_table="0.5:0.3 1:0.6")], ids=["nova", "fastvar"]
)
def test_skipvar_decides_for_each_image(infinity, like, tmp_path) -> None:
    behaviors.skipvar_decides_for_each_image(infinity, emulated(infinity), like, tmp_path)
