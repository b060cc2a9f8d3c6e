"""What captured scales read and write stays where it is, and is read by the host when there is time."""

from __future__ import annotations

import copy

import pytest
import torch
from support.emulated_graphs import EmulatedGraphs
from support.pipelines import ask

from nextscale.engine.rng import PerImageNoise, StaticNoise
from nextscale.engine.rows import Rows
from nextscale.engine.schedule import Schedule
from nextscale.errors import NextscaleError
from nextscale.methods.device_inputs import FetchedInputs
from nextscale.methods.token_cache import StaticMaps, TokenCaches
from nextscale.models.flat_parameters import flatten_parameters
from nextscale.runtime.cudagraph.readback import MAX_COPIED, HostReadback, PendingReport


def test_parameters_share_one_storage(infinity) -> None:
    blocks = copy.deepcopy(infinity.backbone.blocks)
    decoder = copy.deepcopy(infinity.tokenizer.decoder).to(memory_format=torch.channels_last)
    before = {name: (p.clone(), p.stride()) for name, p in decoder.named_parameters()}
    with torch.inference_mode():
        flatten_parameters([*blocks, decoder])
        flatten_parameters([*blocks, decoder])  # there is nothing left to do
    for module in (*blocks, decoder):
        assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == 1
    for name, p in decoder.named_parameters():
        assert torch.equal(p, before[name][0]), name
        assert p.stride() == before[name][1], name
    with torch.no_grad():
        blocks[0].mlp.fc1.weight[0, 0] = 1.0  # still the user's to change
    assert all(map(torch.equal, blocks[1].parameters(), infinity.backbone.blocks[1].parameters()))


def test_flattened_parameters_keep_their_addresses() -> None:
    """Graphs know where weights lie, also those of a module that has but one."""
    module = torch.nn.ModuleDict({"one": torch.nn.Embedding(8, 64), "two": torch.nn.Linear(64, 64)})
    flatten_parameters(module.values())
    addresses = [p.data_ptr() for p in module.parameters()]
    kept = [p.detach().clone() for p in module.parameters()]
    flatten_parameters(module.values())
    assert addresses == [p.data_ptr() for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(kept, module.parameters(), strict=True))


def test_a_pending_report_waits_when_it_is_read() -> None:
    asked = []
    readback = HostReadback(
        {"entropy": torch.tensor([1.5]), "map": torch.zeros(MAX_COPIED + 1)}, torch.tensor([7.0, torch.inf])
    )
    readback.write({"entropy": torch.tensor([2.5]), "map": torch.ones(MAX_COPIED + 1)}, torch.tensor([8.0, torch.inf]))
    report = PendingReport(readback, lambda: asked.append(1))
    assert "entropy" in report
    assert list(report) == ["entropy", "map"]
    assert not asked
    assert report["entropy"].tolist() == [2.5]
    assert asked == [1]
    readback.write({"entropy": torch.tensor([3.5]), "map": torch.ones(MAX_COPIED + 1)}, torch.tensor([8.0, torch.inf]))
    assert report["entropy"].tolist() == [2.5], "it was read, and another replay does not change it"
    assert asked == [1]
    assert report.source is None, "so that an old output does not keep graphs alive"
    assert readback.max_logits == [8.0, float("inf")]
    assert report["map"].sum() == MAX_COPIED + 1


def test_scales_fetch_the_numbers_that_were_uploaded_for_them() -> None:
    """The host may have uploaded those of the next scale before a scale is run."""
    uploads, cpu = FetchedInputs(3), torch.device("cpu")
    buffer = uploads.upload("ratio", [0.5, 0.25], cpu)
    uploads.stage(0)
    assert uploads.upload("ratio", [0.75, 0.5], cpu) is buffer, "a captured scale reads it there"
    uploads.stage(1)
    for scale, expected in ((0, [0.5, 0.25]), (1, [0.75, 0.5])):
        uploads.fetch(scale)
        assert buffer.tolist() == expected
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
    assert buffer.tolist() == [0.125, 0.0]


def test_two_buffers_are_enough_for_a_map() -> None:
    schedule = Schedule.squares((1, 2, 3, 4, 6))
    cache = TokenCaches(StaticMaps(schedule))["x"]
    rows, maps = Rows((0,), ()), {}
    for scale in schedule:
        maps[scale.index] = torch.randn(1, scale.tokens, 2)
        cache.store(rows, scale.grid, maps[scale.index])
        assert torch.equal(cache.read(rows, scale.grid, "nearest"), maps[scale.index])
    assert cache.buffers.nbytes == 4 * 2 * (9 + 16 + 36), "the last scale, which nobody asks, has its own"


def test_a_map_is_not_overwritten_while_it_is_read() -> None:
    """If a scale was left out, and where the grid is always the same."""
    schedule, rows = Schedule.squares((1, 2, 3, 4, 6)), Rows((0,), ())
    for grids in ([(1, 1), (3, 3), (4, 4)], [(1, 1)] * 4):
        cache = TokenCaches(StaticMaps(schedule))["x"]
        cache.store(rows, grids[0], torch.zeros(1, grids[0][0] ** 2, 2))
        for n, grid in enumerate(grids[1:], 1):
            before = cache.latest(rows).maps
            cache.store(rows, grid, torch.full((1, grid[0] * grid[1], 2), float(n)))
            assert (before == n - 1).all()
            assert (cache.latest(rows).maps == n).all()
        assert cache.buffers.nbytes <= 4 * 2 * (9 + 16 + 9), "as few as that takes"


def test_static_noise_is_that_of_the_current_call() -> None:
    first, second = PerImageNoise([1, 2]), PerImageNoise([3, 4])
    static = StaticNoise(first)
    probs = torch.rand(2, 5, 3)
    buffer = static.noise(probs, 2, (0, 1), "token", torch.Tensor.exponential_)
    assert torch.equal(static.categorical(probs, 2, (0, 1)), first.categorical(probs, 2, (0, 1)))
    static.begin(second)
    static.refill(2, (0, 1))
    assert torch.equal(static.categorical(probs, 2, (0, 1)), second.categorical(probs, 2, (0, 1)))
    assert static.noise(probs, 2, (0, 1), "token", torch.Tensor.exponential_) is buffer


class TextLengthRecorder(EmulatedGraphs):
    """Keeps the lengths of the text that every scale was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[torch.Tensor] = []

    def run_scale(self, call, batch, *rest):
        self.lengths.append(batch.cond.text_lengths)
        return super().run_scale(call, batch, *rest)


def test_text_lengths_are_in_a_static_buffer(infinity) -> None:
    """A kernel of a captured scale reads them, in this call and in all others."""
    other = copy.copy(infinity)
    other.executor = graphs = TextLengthRecorder()
    for first in (0, 2):
        ask(other, 2, first=first)
    assert all(length is graphs.current.buffers.inputs[1] for length in graphs.lengths)
