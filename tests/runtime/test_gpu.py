"""The same on a CUDA device: `make test-gpu`.

NEXTSCALE_TEST_DEVICE=cpu runs what it can on a CPU, with an emulated recorder: that says nothing of a GPU, but finds
what is wrong with the tests.
"""

from __future__ import annotations

import copy
import functools
import gc
import os

import pytest
import torch
from support import behaviors
from support.emulated_graphs import EmulatedGraphs
from support.methods import CAPTURED, METHODS, SHAPES
from support.pipelines import BUNDLED, ask, same_tokens
from support.rules import ragged_batches_equal_single_runs

from nextscale import NOVA, DropGuidance, Pipeline, Truncate
from nextscale.errors import NextscaleError
from nextscale.methods.nova.policy import NOVAPolicy
from nextscale.research.verify import verify
from nextscale.runtime.cudagraph.capture import StaticScale
from nextscale.runtime.cudagraph.executor import CUDAGraphExecutor
from nextscale.runtime.registry import make_executor
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var

# In float32, torch lets convolutions round to TF32 unless told otherwise.
torch.backends.cudnn.allow_tf32 = False
DEVICE = os.environ.get("NEXTSCALE_TEST_DEVICE", "cuda")
missing = DEVICE == "cuda" and not torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing, reason="no CUDA device")]
MAKERS = {
    "var": tiny_var,
    "infinity": tiny_infinity,
    "patchified": lambda: tiny_infinity(patchify=True),
    "hart": tiny_hart,
}


# Wide enough for the kernels that real models have; what a method keeps is captured with these alone.
HALF = {
    "var": lambda: tiny_var(width=128),
    "infinity": lambda: tiny_infinity(width=128),
    "patchified": lambda: tiny_infinity(patchify=True, width=128),
    "hart": lambda: tiny_hart(width=128),
}


@functools.cache
def on(device: str, name: str) -> Pipeline:
    """An eager model, which no test changes."""
    return MAKERS[name]().to(device)


@functools.cache
def in_half(name: str) -> Pipeline:
    pipe = HALF[name]().to(DEVICE, dtype="bfloat16")
    pipe.executor.text_buckets = CUDAGraphExecutor.text_buckets  # longer texts are added up in another order
    return pipe


def captured(pipe: Pipeline) -> Pipeline:
    """The same pipeline with graphs. They move weights, so it has to be a model of its own."""
    pipe.executor = make_executor("graphs", pipe.device) if DEVICE == "cuda" else EmulatedGraphs()
    return pipe


def both(name: str, half: bool = False) -> tuple[Pipeline, Pipeline]:
    if half and DEVICE == "cuda":
        return in_half(name), captured(HALF[name]().to(DEVICE, dtype="bfloat16"))
    return on(DEVICE, name), captured(MAKERS[name]().to(DEVICE))


def with_the_callers_generator(pipe: Pipeline, images: int, **options):
    """Random numbers of a CPU: a GPU's own generator draws others from the same seed."""
    return ask(pipe, images, generator=torch.Generator().manual_seed(1), seed=None, output_type="latent", **options)


@pytest.mark.parametrize("case", BUNDLED, ids=lambda p: p.name)
def test_recorded_case(case) -> None:
    report = verify(case, device=DEVICE)
    assert [f"{c.quantity}: {c.error} > {c.tolerance}, {c.first_off}" for c in report.checks if not c.ok] == []


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_cpu_and_gpu(name: str, dtype: str) -> None:
    """Tokens forced, so that one flipped token cannot hide everything behind it."""
    tokens = ask(on("cpu", name), 2).tokens
    logits: list[list] = []
    for pipe in (on("cpu", name), MAKERS[name]().to(DEVICE, dtype=dtype)):
        logits.append([])
        ask(pipe, 2, force_tokens=tokens, callback_on_scale_end=lambda e: logits[-1].append(e.logits.cpu()))
    worst = max((a - b).abs().max().item() for a, b in zip(*logits, strict=True))
    print(f"{dtype}: largest difference of the logits {worst:.1e}")
    assert worst < (1e-4 if dtype == "float32" else 0.3)


@pytest.mark.parametrize("name", MAKERS)
def test_a_plan_per_image(name: str) -> None:
    ragged_batches_equal_single_runs(on(DEVICE, name))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("method", METHODS)
def test_methods(name: str, method: str) -> None:
    """On the GPU a batch is still its single runs, and the CPU decides the same from the same random numbers.

    Sums round differently, by about 1e-6. Weights that differ by as much change no token and no decision in any of
    these cases on a CPU; weights that differ by 1e-5 change up to 3 tokens in one case of twenty. So a GPU may change
    a few, at a draw or a threshold that is nearly a tie. A wrong kernel, row or order changes hundreds.
    """
    pipe, m = on(DEVICE, name), METHODS[method]
    batch = ask(pipe, 2, method=m, output_type="latent")
    single = ask(pipe, 1, first=1, method=m, output_type="latent")
    assert all(torch.equal(b[1:], s) for b, s in zip(batch.tokens, single.tokens, strict=True))
    assert behaviors.counts(batch)[1] == behaviors.counts(single)[0]

    here, there = (with_the_callers_generator(p, 2, method=m) for p in (on("cpu", name), pipe))
    flipped = sum(int((a != b.cpu()).sum()) for a, b in zip(here.tokens, there.tokens, strict=True))
    expected, found = behaviors.counts(here), behaviors.counts(there)
    assert [[rows for rows, _ in image] for image in expected] == [[rows for rows, _ in image] for image in found]
    kept = [[n for image in counts for _, layers in image for n in layers] for counts in (expected, found)]
    moved = [abs(a - b) for a, b in zip(*kept, strict=True)]
    print(f"{name}, {method}: {flipped} tokens and {sum(moved)} of {sum(kept[0])} kept tokens differ from the CPU's")
    assert flipped <= 4
    assert max(moved) <= 1
    assert sum(moved) <= 2


@pytest.mark.parametrize("name", MAKERS)
def test_seeds_on_the_gpu(name: str) -> None:
    pipe = on(DEVICE, name)
    batch = ask(pipe, 3)
    assert same_tokens(batch, ask(pipe, 3))
    single = ask(pipe, 1, first=2)
    assert all(torch.equal(b[2:], s) for b, s in zip(batch.tokens, single.tokens, strict=True))
    here, there = (with_the_callers_generator(p, 3) for p in (on("cpu", name), pipe))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here.tokens, there.tokens, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_graphs_give_the_tokens_of_eager(name: str) -> None:
    """Two calls each, so that the second one replays what the first one captured, with other seeds and prompts."""
    pipe, other = both(name)
    for first in (0, 2, 0):
        assert same_tokens(ask(pipe, 2, first=first), ask(other, 2, first=first))
    for method in (DropGuidance(3), Truncate(1)):
        for first in (0, 2):
            expected, found = (ask(p, 2, first=first, method=method) for p in (pipe, other))
            assert same_tokens(expected, found), method
    assert other.executor.captured > 0


@pytest.mark.parametrize("name", ["var", "infinity", "hart"])
def test_settings_are_those_of_the_call(name: str) -> None:
    behaviors.settings_are_those_of_the_call(*both(name))


@pytest.mark.parametrize("name", MAKERS)
def test_numbers_are_uploaded(name: str) -> None:
    behaviors.numbers_are_uploaded(*both(name))


def test_prompts_of_any_length() -> None:
    pipe, other = (tiny_infinity(text_length=128).to(DEVICE) for _ in range(2))
    captured(other).executor.text_buckets = CUDAGraphExecutor.text_buckets
    behaviors.prompts_of_any_length(pipe, other)


def test_ratios_are_uploaded() -> None:
    pipe, other = both("infinity", half=True)
    before = []
    for tau in (0.8, 0.8, 0.8, 0.7, 0.8):
        method = NOVA(t_est=2, alpha=10, tau=tau)
        expected, found = (ask(p, 1, method=method, output_type="latent") for p in (pipe, other))
        assert behaviors.same(expected, found), tau
        before.append(other.executor.captured)
    assert before[2:] == before[1:2] * 3


def test_methods_are_those_of_the_call() -> None:
    methods = [CAPTURED[name] for name in ("nova", "nova, zero", "nova, early", "sparsevar", "fastvar")]
    behaviors.methods_are_those_of_the_call(*both("infinity", half=True), methods)


@pytest.mark.parametrize("method", [None, "nova", "sparsevar"])
def test_an_old_output_stays(method) -> None:
    behaviors.an_old_output_stays(*both("infinity", half=True), method and CAPTURED[method])


@pytest.mark.parametrize("name", ["var", "infinity", "hart"])
def test_infinite_logits_are_noticed(name: str) -> None:
    behaviors.infinite_logits_are_noticed(both(name)[1])


@pytest.mark.parametrize("how", [None, "one skips", "the first is unguided first"])
def test_what_a_callback_keeps_stays(how) -> None:
    method = how and behaviors.Leaving(**behaviors.LEAVING[how])
    behaviors.what_a_callback_keeps_stays(both("infinity")[1], method)


@pytest.mark.parametrize("like", [None, behaviors.REDUCED], ids=["plain", "nova"])
@pytest.mark.parametrize("how", behaviors.LEAVING)
@pytest.mark.parametrize("name", ["infinity", "hart"])
def test_images_that_leave(name: str, how: str, like) -> None:
    behaviors.images_that_leave(*both(name, half=True), behaviors.LEAVING[how], like)


@pytest.mark.parametrize("like", [None, behaviors.REDUCED], ids=["plain", "nova"])
@pytest.mark.parametrize("name", ["infinity", "hart"])
def test_images_that_a_callback_lets_go(name: str, like) -> None:
    behaviors.images_that_a_callback_lets_go(*both(name, half=True), like)


@pytest.mark.parametrize("name", ["var", "infinity", "hart"])
@pytest.mark.parametrize("method", [None, *CAPTURED])
def test_batches_are_padded(name: str, method) -> None:
    behaviors.batches_are_padded(*both(name, half=True), method and CAPTURED[method])


def test_skipvar_and_nova_decide_for_each_image(tmp_path) -> None:
    behaviors.skipvar_decides_for_each_image(*both("infinity"), NOVA(t_est=2, alpha=0.0), tmp_path)


@pytest.mark.parametrize("patchify", [False, True], ids=["cells", "patches"])
@pytest.mark.parametrize("name", ["nova", "nova, zero", "nova, early"])
def test_kernels_keep_what_the_cpu_keeps(name: str, patchify: bool) -> None:
    """Wide enough for the lens to have a kernel; with the caller's generator, because a GPU draws other numbers."""
    on_cpu, pipe = (tiny_infinity(patchify=patchify, width=64).to(device) for device in ("cpu", DEVICE))
    method = CAPTURED[name]

    pairs = [tuple(with_the_callers_generator(p, 2, method=method) for p in (on_cpu, pipe))]
    expected = ask(pipe, 2, method=method)
    captured(pipe)
    pairs += [(expected, ask(pipe, 2, method=method)) for _ in range(2)]
    for one, other in pairs:
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one.tokens, other.tokens, strict=True))
        kept = [[i["tokens_computed"] for i in out.trace.to_dict()["images"]] for out in (one, other)]
        assert kept[0] == kept[1]


@pytest.mark.skipif(DEVICE == "cpu", reason="bfloat16 takes minutes there")
def test_graphs_read_the_prompts_of_the_call_at_work() -> None:
    """In bfloat16, where our kernels run: prompts of other lengths than those that were captured."""
    pipe = Pipeline.from_pretrained(device=DEVICE, dtype="bfloat16", progress_bar=False)
    other = captured(copy.copy(pipe))
    for prompt in ("a fox", "a red boat on the sea under a yellow moon", "a fox", "two cats"):
        tokens = pipe(prompt, seed=1, output_type="latent").tokens
        again = other(prompt, seed=1, output_type="latent").tokens
        same = [(a == b).float().mean().item() for a, b in zip(tokens, again, strict=True)]
        assert min(same[:4]) == 1.0, "the first scales are short enough to be the same"
        assert sum(same) / len(same) > 0.97


@pytest.mark.parametrize("name", ["var", "infinity", "hart"])
@pytest.mark.parametrize("method", CAPTURED)
def test_methods_in_graphs(name: str, method: str, monkeypatch) -> None:
    """Nothing between two scales' decisions waits for the GPU, and what is kept is what eager mode keeps."""
    pipe, other = both(name, half=True)
    graphs = other.executor
    run = StaticScale.__call__

    def without_waiting(scale, *segments):
        torch.cuda.set_sync_debug_mode("error" if graphs.current.scales else "default")  # compiling waits
        try:
            return run(scale, *segments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    if DEVICE == "cuda":
        monkeypatch.setattr(StaticScale, "__call__", without_waiting)
    for first in (0, 2, 0):
        expected, found = (ask(p, 2, first=first, method=CAPTURED[method], output_type="latent") for p in (pipe, other))
        if "in between" in method and DEVICE == "cuda":
            # Complete scales behind reduced ones: by what rows could have at most, more Triton programs share the keys.
            assert behaviors.counts(expected) == behaviors.counts(found)
        else:
            assert behaviors.same(expected, found)
    assert not graphs.reason


@pytest.mark.parametrize("name", MAKERS)
def test_graphs_of_several_call_shapes_coexist(name: str) -> None:
    pipe, other = both(name)
    for first in (0, 2, 0):
        if first:
            captured_so_far = other.executor.captured
        for options in SHAPES:
            expected, found = (ask(p, 2, first=first, output_type="latent", **options) for p in (pipe, other))
            assert behaviors.same(expected, found), options
    assert other.executor.captured == captured_so_far


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU has these kernels")
@pytest.mark.parametrize("method", {**METHODS, **CAPTURED})
def test_every_method_is_captured_in_half_precision(method: str) -> None:
    """With the kernels that real models have: their heads are as wide."""
    pipe = captured(tiny_infinity(width=128).to("cuda", dtype="bfloat16"))
    for first in (0, 2, 0):
        out = ask(pipe, 2, first=first, method={**METHODS, **CAPTURED}[method], output_type="latent")
        assert torch.isfinite(out.images).all()
        assert not pipe.executor.reason
    assert pipe.executor.captured


@pytest.mark.parametrize("runtime", ["eager", "graphs"])
def test_an_offloaded_text_encoder_leaves_the_gpu(runtime: str) -> None:
    options = {"device": "cuda", "dtype": "bfloat16", "progress_bar": False, "runtime": runtime}
    held, tokens = {}, {}
    for offload in (None, "text"):
        pipe = Pipeline.from_pretrained(offload=offload, **options)
        tokens[offload] = [pipe("a fox", seed=1, output_type="latent").tokens for _ in range(2)][1]
        weights = list(pipe.text_encoder.transformer.parameters())
        assert {p.device.type for p in weights} == {"cpu" if offload else "cuda"}
        nbytes = sum(p.nbytes for p in weights)
        del weights, pipe
        gc.collect()
        torch.cuda.empty_cache()
        empty = torch.cuda.memory_allocated()
        pipe = Pipeline.from_pretrained(offload=offload, **options)
        before = torch.cuda.memory_allocated()
        pipe.encode_prompt("a fox")
        assert abs(torch.cuda.memory_allocated() - before) < nbytes / 5
        held[offload] = torch.cuda.memory_allocated() - empty
        del pipe
    assert held[None] - held["text"] > 0.8 * nbytes
    assert all(torch.equal(a, b) for a, b in zip(*tokens.values(), strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_the_decoder_of_graphs(name: str) -> None:
    pipe, other = both(name)
    a, b = (ask(p, 1, output_type="pt").images for p in (pipe, other))
    assert (a - b).abs().max() < 1e-3


def test_images_are_encoded_after_graphs_ran() -> None:
    """Which offload the encoder."""
    pipe, other = both("infinity")
    image = ask(other, 1, output_type="pt").images
    assert other.tokenizer.encoder.conv_in.weight.device.type == "cpu"
    expected, found = (p.encode(image * 2 - 1) for p in (pipe, other))
    assert all(map(torch.equal, expected, found))
    assert ask(other, 1, output_type="pt").images.device.type == DEVICE


def test_graphs_notice_weights_that_are_not_finite() -> None:
    pipe = captured(tiny_infinity().to(DEVICE))
    ask(pipe, 1)
    with torch.no_grad():
        pipe.backbone.blocks[1].mlp.fc1.weight[0, 0] = float("nan")
    with pytest.raises(NextscaleError, match=r"logits of scale 1 are not finite: the weights of blocks\.1\.mlp"):
        ask(pipe, 1)


class SynchronizingPolicy(NOVAPolicy):
    def select(self, layer, group, x, ctx):
        float(x.mean())  # the host waits for it
        return super().select(layer, group, x, ctx)


class Synchronizing(NOVA):
    """Somebody's own, which waits for the device."""

    def start(self, context):
        return SynchronizingPolicy(context, self)


class NeverWaiting(NOVA):
    """Somebody's own, which waits for nothing."""

    def start(self, context):
        return type("NeverWaitingPolicy", (NOVAPolicy,), {"__module__": __name__})(context, self)


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU is waited for")
def test_a_method_that_synchronizes_is_named_once(caplog) -> None:
    pipe, other = both("infinity", half=True)
    for kind in (Synchronizing, NeverWaiting):
        method = kind(t_est=2, alpha=10)
        for first in (0, 2):
            expected, found = (ask(p, 1, first=first, method=method, output_type="latent") for p in (pipe, other))
            assert behaviors.same(expected, found)
        assert bool(other.executor.reason) == (kind is Synchronizing)
    said = [r.message for r in caplog.records if "waits for the device" in r.message]
    assert len(said) == 1
    assert said[0].startswith("nova waits for the device inside a scale (test_gpu.py, line ")


@pytest.mark.parametrize("name", ["var", "infinity", "hart"])
@pytest.mark.parametrize("method", ["nova", "nova, previous", "toprovar", "sparsevar"])
def test_after_a_warm_up_nothing_is_captured(name: str, method: str) -> None:
    pipe, other = both(name, half=True)
    size = {"pixel_budget": "0.06M"} if name == "infinity" else None
    other.warm_up([size], [CAPTURED[method], None], [1, 2], text_tokens=16)
    before = other.captured
    for first, images in ((0, 2), (2, 1), (4, 2)):
        for m in (CAPTURED[method], None):
            expected, found = (ask(p, images, first=first, method=m, output_type="latent") for p in (pipe, other))
            assert behaviors.same(expected, found)
    assert other.captured == before > 0
