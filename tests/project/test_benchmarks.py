"""Benchmarks of a GPU, played on a CPU by tiny models and emulated graphs: what they ask, count and print."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from support.emulated_graphs import EmulatedGraphs

from nextscale import NOVA
from nextscale.testing import tiny_hart, tiny_infinity

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def infinity():
    """Of this module alone: who decodes as on a GPU turns the weights of the decoder around."""
    return tiny_infinity()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, load):
    """Graphs of any runtime's name."""
    monkeypatch.setattr(load("gpu"), "make_executor", lambda runtime, device: EmulatedGraphs())


def with_graphs(pipe):
    other = copy.copy(pipe)
    other.executor = EmulatedGraphs()
    return other


@pytest.fixture(scope="module")
def found(infinity):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        shapes = importlib.import_module("shapes")
        pipe = with_graphs(infinity)
        return shapes.compare(pipe, shapes.Sweep(["0.06M", "0.25M"], [3.0, 4.0], (2, 8), calls=10)), pipe


def test_shapes_in_random_order_capture_nothing(found, load) -> None:
    result, pipe = found
    assert result["captures"] == 0
    assert [(s["size"], s["method"], s["text"]) for s in result["shapes"]] == [
        (size, method, 8) for size in ("0.25M", "0.06M") for method in ("plain", "nova")
    ], "the largest comes first"
    assert sum(s["captured"] for s in result["shapes"]) == pipe.captured
    assert all(s["captured"] > 0 for s in result["shapes"])
    assert result["warm_up_s"] == pytest.approx(sum(s["s"] for s in result["shapes"]))
    warming = load("nextscale.runtime.warmup")
    assert warming.warm_up_shape.__module__ == warming.__name__, "nothing is recorded any more"


def test_every_kind_of_call_is_told(found, load, capsys) -> None:
    result, _ = found
    assert len(result["kinds"]) == 8
    assert sum(kind["calls"] for kind in result["kinds"]) == 10
    for kind in result["kinds"]:
        assert ("near" in kind) == (kind["method"] == "plain"), "only plain calls always compute the same"
        assert kind["ratio"] > 0
    load("shapes").show(result)
    printed = capsys.readouterr().out
    assert "0 scales captured after the warm-up" in printed
    assert "random order / sorted, call by call" in printed
    json.dumps(result)


def test_calls_are_dealt_evenly_and_never_alike(load, infinity) -> None:
    shapes = load("shapes")
    asked = shapes.Sweep(["0.06M"], [3.0, 4.0], (3, 12), calls=32)
    calls = shapes.sample_calls(with_graphs(infinity), asked)
    kinds = [call.kind for call in calls]
    assert {kinds.count(kind) for kind in kinds} == {4}
    assert kinds != sorted(kinds)
    assert all((3 if call.kind.text == 8 else 9) <= call.tokens <= min(call.kind.text, 12) for call in calls)
    assert (
        len({(c.decision.star, tuple(c.decision.layers.items())) for c in calls}) == len({c.seed for c in calls}) == 32
    )
    again = shapes.sample_calls(with_graphs(infinity), asked)
    assert [vars(call) for call in again] == [vars(call) for call in calls]


def test_how_steady_calls_are(load) -> None:
    shapes, timed = load("shapes"), load("timed")
    kinds = [shapes.Kind("1M", "plain", guidance, 64) for guidance in (3.0, 4.0)]
    seconds = {kinds[0]: [1.0, 1.02, 1.2], kinds[1]: [2.0, 2.0, 2.0]}
    calls = [shapes.Call(kind, 8, 0, None) for kind in kinds for _ in range(3)]
    mixed = dict(zip(calls, [timed.Timed(s, 1.0, 0) for kind in kinds for s in seconds[kind]], strict=True))
    found = shapes.deviation(calls, mixed)
    assert found == {"near": pytest.approx(5 / 6), "farthest": pytest.approx(0.18 / 1.02)}
    ordered = {call: timed.Timed(mixed[call].seconds / 2, 1.0, 0) for call in calls}
    assert shapes.compare_orders(calls, mixed, ordered) == {"ratio": 2.0, "p95_ratio": 2.0}


def test_a_call_is_compared_with_itself(load, infinity) -> None:
    """Played again, a call has the same text, seed and decision, whatever came between; texts of any length."""
    shapes = load("shapes")
    pipe = with_graphs(infinity)
    player = shapes.Player(pipe)
    sweep = shapes.Sweep(["0.06M"], [3.0], (3, 12), 12)
    calls = [call for call in shapes.sample_calls(pipe, sweep) if call.kind.method == "nova"]
    before = pipe.warm_up(["0.06M"], [player.methods["nova"]], text_tokens=12)
    first = [player.play(call) for call in calls]
    again = [player.play(call) for call in reversed(calls)][::-1]
    assert [(t.share, t.flops) for t in first] == [(t.share, t.flops) for t in again]
    assert len({t.share for t in first}) > 1
    assert pipe.captured == before > 0


def test_statistics_of_reduced_calls_stand_apart(load) -> None:
    timed = load("timed")
    calls = [timed.Timed(0.080 + 0.001 * n, 0.2, 10) for n in range(22)] + [timed.Timed(0.230, 1.0, 50)] * 2
    found = timed.summary(calls)
    assert found["calls"] == 24
    assert found["p95_ms"] == pytest.approx(230)
    assert found["reduced"] == pytest.approx({"calls": 22, "ms": 90.5, "mean_ms": 90.5, "p95_ms": 100})
    assert found["not_reduced"] == pytest.approx({"calls": 2, "ms": 230, "mean_ms": 230, "p95_ms": 230})
    assert (found["tokens"], found["mean_tokens"]) == pytest.approx((0.2, (22 * 0.2 + 2) / 24))
    assert timed.summary(calls[-1:])["reduced"] == {}


def test_lines_of_every_kind(load, emulated, infinity, capsys) -> None:
    """Nothing is captured after its warm-up; the first of a runtime also warms up again."""
    gpu = load("gpu")
    asked = ["--brief", "--runtimes", "graphs", "--batches", "2", "--repeats", "6", "--size", "0.06M"]
    rows = list(gpu.rows(copy.copy(infinity), gpu.read_options([*asked, "--ratios", "none", "nova:recorded"])))
    assert [(r["images"], r["ratios"]) for r in rows] == [(2, "none"), (2, "nova:recorded")]
    assert all(r["captures"] == 0 and r["calls"] == 6 and "scales_ms" not in r for r in rows)
    assert ["warm_again_s" in r for r in rows] == [True, False]
    assert not rows[0]["reduced"]
    assert rows[0]["tokens"] == 1
    assert rows[1]["reduced"]
    assert rows[1]["mean_tokens"] < 1
    for row in rows:
        gpu.show({"model": "tiny", **row})
    assert "never reduced" in capsys.readouterr().out


def test_a_model_with_one_size(load, emulated) -> None:
    gpu = load("gpu")
    asked = ["--brief", "--runtimes", "graphs", "--batches", "1", "--repeats", "4", "--decisions", "recorded"]
    rows = list(gpu.rows(tiny_hart(), gpu.read_options(asked)))
    assert [r["captures"] for r in rows] == [0, 0]
    assert rows[1]["reduced"], "recorded decisions are played"


def test_added_pages_are_counted(load, infinity) -> None:
    gpu = load("gpu")
    pipe = copy.copy(infinity)

    class Growing(EmulatedGraphs):
        def open(self, *given):
            self.grown += 1
            return super().open(*given)

    pipe.executor = Growing()
    asked = gpu.CallSeries(pipe, 1, None, {"pixel_budget": "0.06M"}, gpu.text_features(pipe))
    assert gpu.measure(asked, 3)["grown"] == 3
    pipe.executor = EmulatedGraphs()
    assert gpu.measure(asked, 1)["grown"] == 0


def test_images_of_a_batch_have_decisions_of_their_own(load, infinity) -> None:
    gpu, decisions = load("gpu"), load("decisions")
    method, played = gpu.read_ratios("nova:recorded", 4), []
    given = iter(method.source)

    class Watched:
        def __next__(self):
            played.append(next(given))
            return played[-1]

    method = decisions.RecordedNOVA(t_est=method.t_est, source=Watched())
    found = gpu.CallSeries(infinity, 8, method, {"pixel_budget": "0.06M"}, gpu.text_features(infinity))
    made = infinity(**found.next())
    assert len({tuple(d.layers.items()) for d in played}) == 8
    assert [image["activation"]["star"] for image in made.trace.to_dict()["images"]] == [d.star for d in played]


def test_ratios_as_they_are_written(load) -> None:
    gpu = load("gpu")
    assert gpu.read_ratios("none", 4) is None
    assert gpu.read_ratios("nova:recorded,probe=previous", 4).probe == "previous"
    assert gpu.read_ratios("nova:t*=7,spread=0.15,cache=zero", 4).cache == "zero"
    assert gpu.read_ratios(gpu.DECISIONS["own"], 4) == NOVA(t_est=6), "decides by itself"


def test_options_of_the_gpu_benchmark(load, capsys) -> None:
    gpu = load("gpu")
    options = gpu.read_options(["--quantize", "none", "fp8", "--decisions", "own", "recorded"])
    assert options.quantize == ["none", "fp8"]
    assert options.ratios == ["none", "nova:t_est=6", "nova:recorded"]
    assert gpu.read_options([]).ratios == ["none", "nova:recorded", "nova:t*=7,spread=0.15"]
    with pytest.raises(SystemExit):
        gpu.read_options(["--brief", "--profile", "3"])
    assert "leave out --plot and --profile" in capsys.readouterr().err


def test_options_of_shapes(load, capsys) -> None:
    shapes = load("shapes")
    assert shapes.read_options([]).sizes == ["1M", "0.25M"]
    for wrong in (["--texts", "9", "8"], ["--texts", "0", "8"], ["--calls", "0"]):
        with pytest.raises(SystemExit):
            shapes.read_options(wrong)
    assert "the shortest first" in capsys.readouterr().err


def test_the_embedded_model_reads_its_prompts(load) -> None:
    gpu, decisions = load("gpu"), load("decisions")
    pipe = gpu.pipeline("embedded", "none", "cpu")
    assert pipe.dtype is torch.bfloat16
    asked = gpu.CallSeries(pipe, 1, None, {}, gpu.text_features(pipe))
    embeds = [asked.next()["prompt_embeds"][0] for _ in range(decisions.PROMPTS + 1)]
    assert torch.equal(embeds[0], embeds[-1]), "all of them, and then again"
    assert torch.equal(embeds[1], pipe.encode_prompt(decisions.prompts()[1])[0])


@pytest.mark.parametrize("name", ["gpu", "shapes"])
def test_without_a_gpu_they_say_so(load, name: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        load(name).main()


class Event:
    """As of CUDA, where every event comes a millisecond after the one before."""

    marks = 0

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        Event.marks += 1
        self.at = Event.marks

    def elapsed_time(self, later: Event) -> float:
        return float(later.at - self.at)


@pytest.fixture
def pretended_gpu(load, emulated, infinity, monkeypatch):
    """As far as the benchmarks ask for one: its models are tiny."""
    gpu, shapes = load("gpu"), load("shapes")
    for name, value in {"is_available": True, "get_device_name": "a GPU", "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu, "profile", lambda call, lines: (call() and 520, 2.0, 0.5))
    monkeypatch.setattr(gpu, "pipeline", lambda name, quantize: copy.copy(infinity))
    monkeypatch.setattr(gpu, "empty_cache", lambda device: None)
    monkeypatch.setattr(shapes, "random_pipeline", lambda name, dtype: copy.copy(infinity))
    monkeypatch.setattr(shapes, "make_executor", lambda runtime, device: EmulatedGraphs())


def test_the_whole_gpu_benchmark(load, pretended_gpu, monkeypatch, tmp_path, capsys) -> None:
    asked = (
        "--models infinity-2b --quantize none fp8 --runtimes graphs --batches 1 --ratios none --repeats 2 --size 0.06M"
    )
    monkeypatch.setattr(sys, "argv", ["gpu.py", *asked.split(), "--json", str(tmp_path / "found.json")])
    load("gpu").main()
    rows = json.loads((tmp_path / "found.json").read_text())
    assert [row["model"] for row in rows] == ["infinity-2b", "infinity-2b fp8"]
    assert ["cold_s" in row for row in rows] == [True, False]
    assert rows[0]["scales_ms"] == [1.0] * 7
    assert rows[0]["nodes_per_layer"] == pytest.approx(520 / 7 / 4)
    assert "kernels: 2.0 ms, between them 0.5 ms" in capsys.readouterr().out


def test_the_whole_benchmark_of_shapes(load, pretended_gpu, monkeypatch, tmp_path) -> None:
    asked = ["--sizes", "0.06M", "--texts", "3", "8", "--calls", "4"]
    monkeypatch.setattr(sys, "argv", ["shapes.py", *asked, "--json", str(tmp_path / "found.json")])
    load("shapes").main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["model"], found["captures"], len(found["kinds"])) == ("infinity-2b", 0, 4)


def test_pages_are_measured_at_what_a_run_has(load, monkeypatch, capsys) -> None:
    pages = load("pages")
    assert {case.complete for case in pages.cases("packed")} == {False}
    assert {case.complete for case in pages.cases("complete")} == {True}
    assert len(pages.cases(None)) == len(pages.PACKED) + len(pages.COMPLETE)
    assert all(3 <= case.sets <= 32 for case in pages.cases(None))
    times = {"attention": 10.0, "attention in pages": 10.5, "store": 4.0, "store in pages": 5.0, "off": 0.0}
    assert "1.050" in pages.line(pages.PACKED[0], times)
    assert "1.250" in pages.line(pages.PACKED[0], times)
    if torch.cuda.is_available():
        return
    for arguments, said in (["--only", "packed"], "6 cases"), (["--only", "some"], ""):
        monkeypatch.setattr(sys, "argv", ["pages.py", *arguments])
        with pytest.raises(SystemExit):
            pages.main()
        assert said in capsys.readouterr().out


def test_what_attention_entropy_costs(load, infinity, capsys) -> None:
    cost = load("toprovar_cost")
    six = cost.table_6(2, 16, 4, infinity.schedule(pixel_budget="0.06M"), "cpu", repeats=2)
    assert list(six) == [
        "frequency",
        "naive",
        "attention",
        "with entropy",
        "SVD, one layer",
        "SVD, all layers",
        "SVD, all layers, one by one",
    ]
    assert all(one > 0 for _, one in six.values())
    assert all(six[name][0] > six[name][1] for name in ("naive", "with entropy")), "one of several scales"
    five = cost.table_5(infinity, "eager", repeats=1)
    assert [share < 0.9 for _, share in five.values()] == [False, True, True, True]
    assert five["ToProVAR, entropy apart"][1] == five["ToProVAR, entropy in the kernel"][1]
    cost.show("a", six, "b", five)
    printed = capsys.readouterr().out
    assert "SVD, all layers, one by one" in printed
    assert "1.00x      100.0%" in printed


def test_entropy_apart_is_the_same(load, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernel is asked for attention alone; here torch plays the kernel."""
    cost = load("toprovar_cost")
    attention = cost.flash_attention
    q, k, v = (torch.randn(2, 3, n, 8) for n in (5, 9, 9))
    length, more = torch.tensor([4, 2]), torch.tensor([3, 5])
    want = attention.attend(q, k, v, 0.5, length, more, True)
    torch_attention = attention.scaled_dot_product_attention
    asked = []

    def kernel(q, k, v, scale, length, more, return_entropy, *rest):
        asked.append(return_entropy)
        k, v = (attention.zero_masked(t, attention._visible(t, length + more)) for t in (k, v))
        return torch_attention(q, k, v, scale, attention._visible(k, length + more)), None

    monkeypatch.setattr(attention, "supports", lambda q: True)
    monkeypatch.setattr(attention, "fused_attention", kernel)
    with cost.entropy_apart():
        out, entropy = attention.attend(q, k, v, 0.5, length, more, True)
    assert asked == [False]
    assert torch.equal(out, want[0])
    assert torch.equal(entropy, want[1])
    assert attention.fused_attention is kernel, "as before"
