"""Other ways to run a scale give what the eager one gives. What needs a GPU is in test_gpu.py."""

from __future__ import annotations

import copy
import gc
import json
import logging
import weakref
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from support import behaviors
from support.emulated_graphs import EmulatedGraph, EmulatedGraphs
from support.methods import CAPTURED, SHAPES
from support.pipelines import ask, same_tokens
from torch import nn
from torch.nn import functional as F

from nextscale import NOVA, DropGuidance, FastVAR, RandomSelection, SkipVAR, SparseVAR, ToProVAR, Truncate
from nextscale.engine.rng import PerImageNoise, StaticNoise
from nextscale.engine.schedule import Schedule
from nextscale.engine.state import Rows
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method, Policy, PolicyContext
from nextscale.methods.device_inputs import FetchedInputs
from nextscale.methods.token_cache import Places, TokenCaches
from nextscale.models.fp8 import to_fp8
from nextscale.models.packing import pack
from nextscale.runtime import make_executor, with_enough_memory
from nextscale.runtime.compiled import Compiled
from nextscale.runtime.cudagraph.capture import SHORT, HostReadback, Report
from nextscale.runtime.cudagraph.executor import Graphs
from nextscale.runtime.decoder import GPUDecoder, doubled
from nextscale.runtime.eager import Eager
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var
from nextscale.tokenizers.autoencoder import Decoder, Upsample


class Counting:
    """A backend of torch.compile that runs what it is given and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, module, inputs):
        self.asked += 1
        return module.forward


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_blocks_give_the_same_tokens(any_pipe, fresh) -> None:
    plain = ask(any_pipe, 2, output_type="pt")
    backend = Counting()
    other = copy.copy(any_pipe)
    other.executor = Compiled(backend)
    again = ask(other, 2, output_type="pt")
    assert same_tokens(plain, again)
    assert torch.allclose(plain.images, again.images, atol=1e-5)
    assert again.trace.to_dict()["runtime"] == "compiled"
    # Three functions, each for one token and for any number of them: not one for every layer or scale.
    assert backend.asked <= 6


def test_compiled_blocks_with_a_method(any_pipe, fresh) -> None:
    method = NOVA(t_est=2, alpha=10, uncomputed="nothing") + Truncate(1)
    plain = ask(any_pipe, 2, method=method)
    other = copy.copy(any_pipe)
    other.executor = Compiled("eager")
    again = ask(other, 2, method=method)
    assert plain.trace.share() < 0.9
    assert same_tokens(plain, again)


@pytest.mark.parametrize("make", [tiny_var, tiny_infinity, tiny_hart])
def test_compiled_blocks_in_8_bits(make, fresh) -> None:
    """Every layer has factors of its own, and they still share their code."""
    plain = make().to(dtype="bfloat16")
    to_fp8(plain.backbone, plain.tokenizer)
    backend = Counting()
    other = copy.copy(plain)
    other.executor = Compiled(backend)
    assert same_tokens(ask(plain, 2), ask(other, 2))
    assert backend.asked <= 6


def test_graphs_read_and_write_fixed_places(any_pipe, fresh) -> None:
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
    assert graphs.recorded == scales
    for method in (DropGuidance(3), Truncate(1)):
        for first in (0, 2):
            assert same_tokens(ask(any_pipe, 2, first=first, method=method), ask(other, 2, first=first, method=method))
    assert graphs.recorded == 2 * scales - 2, "rows without guidance have graphs of their own"
    assert same_tokens(ask(any_pipe, 1), ask(other, 1)), "another shape, another program"


def test_a_progress_bar_costs_nothing(infinity, fresh) -> None:
    """Only a callback looks at the maps between two scales, and has graphs of its own."""
    other = copy.copy(infinity)
    other.executor = graphs = EmulatedGraphs()
    other.progress_bar = None
    ask(other, 1)
    assert not any(watched for watched, *_ in graphs.program.graphs)
    ask(other, 1, callback_on_scale_end=lambda end: None)
    assert any(watched for watched, *_ in graphs.program.graphs)


def test_weights_side_by_side(infinity) -> None:
    blocks = copy.deepcopy(infinity.backbone.blocks)
    decoder = copy.deepcopy(infinity.tokenizer.decoder).to(memory_format=torch.channels_last)
    before = {name: (p.clone(), p.stride()) for name, p in decoder.named_parameters()}
    with torch.inference_mode():
        pack([*blocks, decoder])
        pack([*blocks, decoder])  # there is nothing left to do
    for module in (*blocks, decoder):
        assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == 1
    for name, p in decoder.named_parameters():
        assert torch.equal(p, before[name][0]), name
        assert p.stride() == before[name][1], name
    with torch.no_grad():
        blocks[0].mlp.fc1.weight[0, 0] = 1.0  # still the user's to change
    assert all(map(torch.equal, blocks[1].parameters(), infinity.backbone.blocks[1].parameters()))


@pytest.mark.parametrize("method", [NOVA(t_est=4, alpha=10), NOVA(t_est=4, alpha=10) + Truncate(1)])
def test_complete_scales_are_not_waited_for(infinity, monkeypatch, method) -> None:
    """Nothing depends on what the first scales report, so the device never idles behind them."""
    happened = []
    replay, wait = EmulatedGraph.replay, EmulatedGraph.wait
    monkeypatch.setattr(EmulatedGraph, "replay", lambda self: (happened.append("replay"), replay(self)))
    monkeypatch.setattr(EmulatedGraph, "wait", lambda self: (happened.append("wait"), wait(self)))
    other = copy.copy(infinity)
    other.executor = EmulatedGraphs()
    for first in (0, 2):
        happened.clear()
        ask(other, 1, first=first, method=method)
        assert happened[:4] == ["replay"] * 4
        assert happened[4] == "wait", "the fifth scale is decided by the four before"


def test_forgotten_graphs_are_gone(infinity) -> None:
    """When memory runs out, eager mode has to find it."""
    other = copy.copy(infinity)
    other.executor = graphs = EmulatedGraphs()
    made = ask(other, 1)  # nobody asks what its scales report
    known = [weakref.ref(captured.graph) for _, captured in graphs.ran]
    assert len(known) == len(made.tokens)
    del made
    graphs.forget()
    gc.collect()
    assert not any(graph() for graph in known)


def test_a_report_waits_when_it_is_asked() -> None:
    asked = []
    told = HostReadback({"entropy": torch.tensor([1.5]), "map": torch.zeros(SHORT + 1)}, torch.tensor([7.0, torch.inf]))
    told.write({"entropy": torch.tensor([2.5]), "map": torch.ones(SHORT + 1)}, torch.tensor([8.0, torch.inf]))
    report = Report(told, lambda: asked.append(1))
    assert "entropy" in report
    assert list(report) == ["entropy", "map"]
    assert not asked
    assert report["entropy"].tolist() == [2.5]
    assert asked == [1]
    told.write({"entropy": torch.tensor([3.5]), "map": torch.ones(SHORT + 1)}, torch.tensor([8.0, torch.inf]))
    assert report["entropy"].tolist() == [2.5], "it was read, and another replay does not change it"
    assert asked == [1]
    assert report.source is None, "so that an old output does not keep graphs alive"
    assert told.largest == [8.0, float("inf")]
    assert report["map"].sum() == SHORT + 1


def test_scales_fetch_the_numbers_that_were_told_for_them() -> None:
    """The host may have told those of the next scale before a scale is run."""
    uploads, cpu = FetchedInputs(3), torch.device("cpu")
    place = uploads.upload("ratio", [0.5, 0.25], cpu)
    uploads.stage(0)
    assert uploads.upload("ratio", [0.75, 0.5], cpu) is place, "a captured scale reads it there"
    uploads.stage(1)
    for scale, expected in ((0, [0.5, 0.25]), (1, [0.75, 0.5])):
        uploads.fetch(scale)
        assert place.tolist() == expected
    order = uploads.upload(
        "order", torch.tensor([3.0, 1.0]), cpu
    )  # what is long or made on the device is there at once
    assert order.tolist() == [3.0, 1.0]
    assert list(uploads.pending) == ["ratio"]
    with pytest.raises(NextscaleError, match="'ratio' was uploaded as 2 numbers, and is 1 now"):
        uploads.upload("ratio", [1.0], cpu)
    uploads.reset()
    uploads.upload("ratio", [0.125, 0.0], cpu)
    uploads.stage(2)
    uploads.fetch(2)
    assert place.tolist() == [0.125, 0.0]


class Waiting(NOVA):
    """A method of somebody's own, which does not say that its scales can be captured."""

    def start(self, context: PolicyContext) -> Policy:
        policy = super().start(context)
        policy.capturable = False
        return policy


def test_what_cannot_be_captured_runs_all_the_same(any_pipe, fresh) -> None:
    other = copy.copy(any_pipe)
    other.executor = graphs = EmulatedGraphs()
    for options in (
        {"method": Waiting(t_est=2, alpha=10)},
        {"generator": torch.Generator().manual_seed(3), "seed": None},
        {"force_tokens": ask(any_pipe, 2).tokens[:2]},
    ):
        if "generator" in options:
            expected = ask(any_pipe, 2, generator=torch.Generator().manual_seed(3), seed=None)
        else:
            expected = ask(any_pipe, 2, **options)
        assert same_tokens(expected, ask(other, 2, **options))
    assert graphs.recorded == 0


def test_what_was_packed_stays() -> None:
    """Graphs know where weights lie, also those of a module that has but one."""
    module = torch.nn.ModuleDict({"one": torch.nn.Embedding(8, 64), "two": torch.nn.Linear(64, 64)})
    pack(module.values())
    places = [p.data_ptr() for p in module.parameters()]
    kept = [p.detach().clone() for p in module.parameters()]
    pack(module.values())
    assert places == [p.data_ptr() for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(kept, module.parameters(), strict=True))


def test_graphs_of_several_shapes_live_side_by_side(var, monkeypatch) -> None:
    monkeypatch.setattr("nextscale.runtime.cudagraph.executor.MAX_PROGRAMS", len(SHAPES))
    other = copy.copy(var)
    other.executor = graphs = EmulatedGraphs()
    for round_ in range(2):
        for options in SHAPES:
            expected, found = (ask(pipe, 1, first=round_, output_type="latent", **options) for pipe in (var, other))
            assert same_tokens(expected, found)
        if not round_:
            recorded = graphs.recorded
    assert graphs.recorded == recorded
    assert len(graphs.programs) == len(SHAPES)
    assert len(graphs.ground.chunks) == 1, "they share their memory"
    ask(other, 2, output_type="latent")  # one more: the first, which was not used for longest, leaves
    ask(other, 1, output_type="latent", **SHAPES[2])
    assert graphs.recorded == recorded + len(found.tokens)
    ask(other, 1, output_type="latent", **SHAPES[0])
    assert graphs.recorded == recorded + 2 * len(found.tokens)


def test_graphs_of_other_shapes_leave_when_memory_is_scarce(var, monkeypatch) -> None:
    other = copy.copy(var)
    other.executor = graphs = EmulatedGraphs()
    for options in SHAPES[:3]:
        ask(other, 1, output_type="latent", **options)
    expected, tries, prepare = ask(var, 2), [], graphs.record_state

    def record_state(call, program):
        tries.append(len(graphs.programs))
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
        return prepare(call, program)

    monkeypatch.setattr(graphs, "record_state", record_state)
    assert same_tokens(expected, ask(other, 2))
    assert tries == [3, 0]
    assert len(graphs.programs) == 1
    assert not graphs.reason
    monkeypatch.setattr("nextscale.runtime.cudagraph.executor.is_scarce", lambda device: True)
    ask(other, 1, output_type="latent")
    assert len(graphs.programs) == 1


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


def close(a, b) -> bool:
    """Equal, but for the last digits of numbers: padding changes the order in which they are added."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == pytest.approx(b, abs=1e-5) if isinstance(a, float) else a == b


@pytest.mark.parametrize("name", CAPTURED)
def test_methods_keep_in_graphs_what_they_keep_without(any_pipe, name: str) -> None:
    method, other = CAPTURED[name], copy.copy(any_pipe)
    other.executor = graphs = EmulatedGraphs()
    for first in (0, 2, 4, 0):
        expected, found = (ask(pipe, 2, first=first, method=method) for pipe in (any_pipe, other))
        assert same_tokens(expected, found)
        assert close(expected.trace.to_dict()["images"], found.trace.to_dict()["images"])
        kept = [[r.trace.kept(1, len(r.tokens), layer) for layer in (1, 2)] for r in (expected, found)]
        assert np.array_equal(*kept)
        with torch.inference_mode():
            for chunk in graphs.ground.chunks:
                chunk.fill_(255)  # NaN in any format: a decoder may leave that in the caches
    assert graphs.recorded, graphs.reason


@pytest.mark.parametrize("probe", ["lens", "previous"])
def test_pictures_that_begin_at_different_scales_share_graphs(infinity, probe: str, monkeypatch) -> None:
    stars: list[int] = []  # of the pictures of a call: the scale behind which they are reduced

    def ratio(self, growth, t: int) -> float:
        star = stars[next(n for n, g in enumerate(self.growth) if g is growth)]
        return 0.5 if t > star else 0.0

    monkeypatch.setattr("nextscale.methods.nova.NOVAPolicy._ratio", ratio)
    method, other = NOVA(t_est=2, probe=probe), copy.copy(infinity)
    other.executor = graphs = EmulatedGraphs()
    shelves = []
    for stars[:] in ([5, 5], [3, 3], [3, 5], [5, 3], [3, 3]):  # after the first call caches are as large as need be
        expected, found = (ask(pipe, 2, method=method) for pipe in (infinity, other))
        assert same_tokens(expected, found)
        assert close(expected.trace.to_dict()["images"], found.trace.to_dict()["images"])
        shelves.append(len(graphs.program.graphs))
    assert shelves[1] < shelves[2], "a complete picture among the others may run other code"
    assert shelves[2:] == [shelves[2]] * 3, "but not another one in its place"


@pytest.mark.parametrize("name", ["nova", "nova, early", "nova, previous", "fastvar", "sparsevar", "toprovar"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
def test_maps_that_are_not_finite(any_pipe, name: str, captured: bool) -> None:
    """Methods decide from numbers that are not; what the user reads is what is wrong."""
    pipe = copy.copy(any_pipe)
    if captured:
        pipe.executor = EmulatedGraphs()

    def spoil(end):
        return torch.full_like(end.features, torch.nan) if end.scale.index == 4 else None

    with pytest.raises(NextscaleError, match="logits of scale 6 are not finite"):
        ask(pipe, 2, method=CAPTURED[name], callback_on_scale_end=spoil)


@dataclass(frozen=True)
class Resting(Method):
    """The first image leaves out the fourth scale and stops before the last, with NOVA's reduction or without.

    Or every image leaves out one scale.
    """

    name, summary = "resting", ""
    like: Method | None = None
    everyone: int | None = None  # leaves out this one, from 0

    def start(self, context):
        policy = Policy(context) if self.like is None else self.like.start(context)
        inner = policy.plan_scale

        def plan_scale(scale):
            plan = inner(scale)
            if self.everyone is not None:
                return plan._replace(actions=("skip" if scale.index == self.everyone else "run",) * context.images)
            first = {3: "skip", len(context.schedule) - 1: "stop"}.get(scale.index, "run")
            return plan._replace(actions=(first, *["run"] * (context.images - 1)))

        policy.plan_scale = plan_scale
        return policy


@pytest.mark.parametrize("like", [None, NOVA(t_est=2, alpha=10, uncomputed="nothing")])
def test_pictures_that_rest(any_pipe, like) -> None:
    other = copy.copy(any_pipe)
    other.executor = graphs = EmulatedGraphs()
    # All these calls share a program, and must not take each other's graphs.
    some, fourth, sixth = (Resting(like, everyone=n) for n in (None, 3, 5))
    for first, method in ((0, some), (0, fourth), (2, like), (2, some), (2, fourth), (0, sixth), (2, like), (0, some)):
        assert same_tokens(*(ask(p, 2, first=first, method=method) for p in (any_pipe, other))), method
    assert graphs.recorded


def test_two_places_are_enough_for_a_map() -> None:
    schedule = Schedule.squares((1, 2, 3, 4, 6))
    cache = TokenCaches(Places(schedule))["x"]
    rows, maps = Rows((0,), ()), {}
    for scale in schedule:
        maps[scale.index] = torch.randn(1, scale.tokens, 2)
        cache.store(rows, scale.grid, maps[scale.index])
        assert torch.equal(cache.read(rows, scale.grid, "nearest"), maps[scale.index])
    assert cache.places.nbytes == 4 * 2 * (9 + 16 + 36), "the last scale, which nobody asks, has its own"


def test_a_map_is_not_written_over_while_it_is_read() -> None:
    """If a scale was left out, and where the grid is always the same."""
    schedule, rows = Schedule.squares((1, 2, 3, 4, 6)), Rows((0,), ())
    for grids in ([(1, 1), (3, 3), (4, 4)], [(1, 1)] * 4):
        cache = TokenCaches(Places(schedule))["x"]
        cache.store(rows, grids[0], torch.zeros(1, grids[0][0] ** 2, 2))
        for n, grid in enumerate(grids[1:], 1):
            before = cache.newest(rows).maps
            cache.store(rows, grid, torch.full((1, grid[0] * grid[1], 2), float(n)))
            assert (before == n - 1).all()
            assert (cache.newest(rows).maps == n).all()
        assert cache.places.nbytes <= 4 * 2 * (9 + 16 + 9), "as few as that takes"


def test_what_a_callback_keeps_is_not_overwritten(any_pipe, fresh) -> None:
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


def test_skipvar_sees_two_different_previews(infinity, fresh, tmp_path) -> None:
    stage = {"classes": [0, 1, 2], "mean": [0.0, 0.0], "scale": [1.0, 1.0], "intercept": [0.0, 0.0, 0.0]}
    stage["coef"] = [[-1000.0, 0.0], [0.0, 0.0], [1000.0, 0.0]]  # leaves scales out where the picture still changes
    decision = tmp_path / "decision.json"
    decision.write_text(json.dumps({"skip": stage}))
    method, other = SkipVAR(str(decision), at=0.5), copy.copy(infinity)
    other.executor = graphs = EmulatedGraphs()
    for first in (0, 2):
        expected, found = (ask(pipe, 2, first=first, method=method) for pipe in (infinity, other))
        assert same_tokens(expected, found)
        assert expected.trace.policy.features[0][0] > 0
        assert found.trace.policy.features[0] == pytest.approx(expected.trace.policy.features[0], rel=1e-3)
    assert graphs.recorded


def test_a_callback_may_change_the_maps_of_graphs(any_pipe, fresh) -> None:
    other = copy.copy(any_pipe)
    other.executor = EmulatedGraphs()
    double = {"callback_on_scale_end": lambda end: end.features * 1.5 if end.scale.index == 2 else None}
    for _ in range(2):
        assert same_tokens(ask(any_pipe, 2, **double), ask(other, 2, **double))


def test_enlarging_is_a_transposed_convolution() -> None:
    torch.manual_seed(0)
    upsample = Upsample(6)
    x = torch.randn(2, 6, 5, 7)
    found = F.conv_transpose2d(x, doubled(upsample.conv.weight), upsample.conv.bias, stride=2, padding=1)
    assert torch.allclose(found, upsample(x), atol=1e-5)


@pytest.mark.parametrize("attention", [False, True])
def test_the_decoder_for_a_gpu(attention: bool, monkeypatch) -> None:
    torch.manual_seed(0)
    decoder = Decoder(32, (1, 2, 2, 4), 4, 1, attention).requires_grad_(False)
    for module in decoder.modules():  # biases and norms that do something
        if isinstance(module, (nn.GroupNorm, nn.Conv2d)):
            nn.init.normal_(module.bias)
    z = torch.randn(2, 4, 6, 5)
    expected = decoder(z)
    for at_once in (1, 2**20):  # one by one, or both
        monkeypatch.setattr("nextscale.runtime.decoder.AT_ONCE", at_once)
        assert torch.allclose(GPUDecoder(decoder)(z), expected, atol=1e-4 * expected.abs().max())


def test_fixed_draws_are_those_of_the_call_at_work() -> None:
    first, second = PerImageNoise([1, 2]), PerImageNoise([3, 4])
    fixed = StaticNoise(first)
    probs = torch.rand(2, 5, 3)
    place = fixed.noise(probs, 2, (0, 1), "token", torch.Tensor.exponential_)
    assert torch.equal(fixed.categorical(probs, 2, (0, 1)), first.categorical(probs, 2, (0, 1)))
    fixed.begin(second)
    fixed.refill(2, (0, 1))
    assert torch.equal(fixed.categorical(probs, 2, (0, 1)), second.categorical(probs, 2, (0, 1)))
    assert fixed.noise(probs, 2, (0, 1), "token", torch.Tensor.exponential_) is place


def test_padding_of_prompts_changes_nothing(any_pipe) -> None:
    plain = ask(any_pipe, 2)
    other = copy.copy(any_pipe)
    other.executor = make_executor("eager", any_pipe.device)
    other.executor.text_slots = (64,)
    assert same_tokens(plain, ask(other, 2))


def test_an_unknown_runtime() -> None:
    with pytest.raises(NextscaleError, match="unknown runtime 'fast'; allowed: eager, compiled, graphs"):
        make_executor("fast", torch.device("cpu"))


def test_graphs_without_a_gpu(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert make_executor("graphs", torch.device("cpu")).name == "eager"
    assert "runtime graphs needs a CUDA GPU, not cpu; the pictures are made with runtime eager" in caplog.text


class Noting(EmulatedGraphs):
    """Keeps the lengths of the text that every scale was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[torch.Tensor] = []

    def run_scale(self, call, batch, *rest):
        self.lengths.append(batch.state.text_lengths)
        return super().run_scale(call, batch, *rest)


def test_lengths_of_the_text_are_at_their_fixed_place(infinity) -> None:
    """A kernel of a captured scale reads them, in this call and in all others."""
    other = copy.copy(infinity)
    other.executor = graphs = Noting()
    for first in (0, 2):
        ask(other, 2, first=first)
    assert all(length is graphs.program.inputs[1] for length in graphs.lengths)


class Small(EmulatedGraphs):
    """A device whose memory is too small for what it keeps."""

    def run_scale(self, call, batch, *rest):
        if batch.scale.index == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
        return super().run_scale(call, batch, *rest)


def test_out_of_memory(infinity, caplog) -> None:
    other = copy.copy(infinity)
    other.executor = Small()
    with caplog.at_level(logging.WARNING):
        found = ask(other, 2)
    assert same_tokens(ask(infinity, 2), found)
    assert found.trace.to_dict()["runtime"] == "eager"
    assert "too small for runtime graphs" in caplog.text
    assert other.executor.program is None
    sentence = r"ran out of memory for 2 pictures of \d+ tokens \(tried to allocate 2.50 gib\); allowed: fewer pictures"
    for once in ({"callback_on_scale_end": lambda end: None}, {"generator": torch.Generator(), "seed": None}):
        with pytest.raises(NextscaleError, match=sentence):
            ask(other, 2, **once)


def emulated(pipe):
    """The same model, its scales recorded."""
    other = copy.copy(pipe)
    other.executor = EmulatedGraphs()
    return other


def test_settings_are_those_of_the_call(any_pipe) -> None:
    behaviors.settings_are_those_of_the_call(any_pipe, emulated(any_pipe))


def test_numbers_are_told(any_pipe) -> None:
    behaviors.numbers_are_told(any_pipe, emulated(any_pipe))


def test_prompts_of_any_length() -> None:
    pipe = tiny_infinity(text_length=128)
    other = emulated(pipe)
    other.executor.text_slots = Graphs.text_slots
    behaviors.prompts_of_any_length(pipe, other)


@pytest.mark.parametrize(
    ("method", "like", "unlike"),
    [
        (NOVA(t_est=2, alpha=10), NOVA(t_est=2, alpha=5, tau=0.7, lam=0.2), NOVA(t_est=2, alpha=10, probe="previous")),
        (RandomSelection(NOVA(t_est=2, alpha=10)), RandomSelection(NOVA(t_est=2, alpha=10), seed=3), NOVA(t_est=2)),
        (ToProVAR(tau=0.3, a_max=0.9), ToProVAR(tau=0.35, a_max=0.9), ToProVAR(tau=0.3, a_max=0.8)),
    ],
    ids=["nova", "random", "toprovar"],
)
def test_what_only_the_host_reads_of_a_method_is_not_captured(infinity, method, like, unlike) -> None:
    other = emulated(infinity)
    recorded = []
    for m in (method, method, method, like, method, unlike):
        expected, found = (ask(pipe, 1, method=m, output_type="latent") for pipe in (infinity, other))
        assert behaviors.same(expected, found), m
        recorded.append(other.executor.recorded)
    assert recorded[2:5] == [recorded[1]] * 3
    assert recorded[5] > recorded[4]
    assert len(other.executor.programs) == 2


def test_parts_that_decide_on_the_host_are_not_captured(infinity) -> None:
    """Only scales whose rows differ are: those without guidance."""
    nova, other = NOVA(t_est=2, alpha=10), emulated(infinity)
    recorded = []
    for method in (nova, nova, nova + DropGuidance(6), nova + DropGuidance(7), nova + DropGuidance(6), nova):
        expected, found = (ask(pipe, 1, method=method, output_type="latent") for pipe in (infinity, other))
        assert behaviors.same(expected, found), method
        recorded.append(other.executor.recorded)
    assert len(other.executor.programs) == 1
    assert [b - a for a, b in pairwise(recorded)] == [0, 2, 1, 0, 0]


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


@pytest.mark.parametrize(
    "like", [NOVA(t_est=2, alpha=0.0), FastVAR(scale_table="0.5:0.3 1:0.6")], ids=["nova", "fastvar"]
)
def test_skipvar_decides_for_each_image(infinity, like, tmp_path) -> None:
    behaviors.skipvar_decides_for_each_image(infinity, emulated(infinity), like, tmp_path)


@pytest.mark.parametrize("name", CAPTURED)
def test_batches_are_filled_up(infinity, name: str) -> None:
    behaviors.batches_are_filled_up(infinity, emulated(infinity), CAPTURED[name])


def test_batches_of_any_model_are_filled_up(any_pipe) -> None:
    behaviors.batches_are_filled_up(any_pipe, emulated(any_pipe), None)


def test_a_callback_sees_the_pictures_that_were_asked_for(infinity) -> None:
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


def test_how_batches_are_filled_up(infinity) -> None:
    """Only to what was warmed up, and to less than twice as many; each other size has graphs of its own."""
    other = emulated(infinity)

    def places() -> list[int]:
        return [other.executor.places(n, other.backbone, PerImageNoise([0] * n), ()) for n in (1, 2, 3, 4, 5, 9)]

    assert places() == [1, 2, 3, 4, 5, 9]
    other.warm_up(["0.06M"], batches=[2, 4], text_tokens=16)
    assert places() == [2, 2, 4, 4, 5, 9]
    assert len(ask(other, 3, generator=torch.Generator(), seed=None).images) == 3  # eager, and drawn for three alone
    other.executor.forget()
    assert places() == [1, 2, 3, 4, 5, 9]


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
    eager.executor.text_slots = EmulatedGraphs.text_slots  # longer texts are added up in another order
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
def test_a_warm_up_for_nonsense(infinity, options, said: str) -> None:
    other = emulated(infinity)
    with pytest.raises(NextscaleError, match=said):
        other.warm_up(**options)
    assert other.captured == 0
