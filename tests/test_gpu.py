"""The same on a CUDA device: `make test-gpu`."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from conftest import BUNDLED, ask, same_tokens
from nextscale import DropGuidance, Pipeline, Truncate
from nextscale.errors import NextscaleError
from nextscale.runtime import make_executor
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var
from nextscale.verify import verify
from test_loop import test_ragged_selections_in_a_batch_equal_single_runs as check_ragged
from test_methods import METHODS
from test_runtime import CAPTURED

# In float32, torch lets convolutions round to TF32 unless told otherwise.
torch.backends.cudnn.allow_tf32 = False
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MAKERS = {
    "var": tiny_var,
    "infinity": tiny_infinity,
    "patchified": lambda: tiny_infinity(patchify=True),
    "hart": tiny_hart,
}


@pytest.mark.parametrize("case", BUNDLED, ids=lambda p: p.name)
def test_recorded_case(case) -> None:
    report = verify(case, device="cuda")
    assert [f"{c.quantity}: {c.error} > {c.tolerance}, {c.first_off}" for c in report.checks if not c.ok] == []


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_cpu_and_gpu(make, dtype: str) -> None:
    """Tokens forced, so that one flipped token cannot hide everything behind it."""
    tokens = ask(make(), 2).tokens
    logits: dict[str, list] = {"cpu": [], "cuda": []}
    for device, kept in logits.items():
        pipe = make().to(device, dtype=dtype if device == "cuda" else None)
        ask(pipe, 2, force_tokens=tokens, callback_on_scale_end=lambda e, kept=kept: kept.append(e.logits.cpu()))
    worst = max((a - b).abs().max().item() for a, b in zip(*logits.values(), strict=True))
    print(f"{dtype}: largest difference of the logits {worst:.1e}")
    assert worst < (1e-4 if dtype == "float32" else 0.3)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_plan_per_image(make) -> None:
    check_ragged(make().to("cuda"))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", METHODS)
def test_methods(make, name: str) -> None:
    """On the GPU a batch is still its single runs, and the CPU decides the same from the same random numbers."""
    pipe, method = make().to("cuda"), METHODS[name]
    batch = ask(pipe, 2, method=method)
    single = ask(pipe, 1, first=1, method=method)
    agree = [torch.equal(b[1:], s) for b, s in zip(batch.tokens, single.tokens, strict=True)]
    there = [i["tokens_computed"] for i in batch.trace.to_dict()["images"]]
    assert there[1] == single.trace.to_dict()["images"][0]["tokens_computed"]
    assert all(agree)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_seeds_on_the_gpu(make) -> None:
    pipe = make().to("cuda")
    batch = ask(pipe, 3)
    assert same_tokens(batch, ask(pipe, 3))
    single = ask(pipe, 1, first=2)
    equal = [torch.equal(b[2:], s) for b, s in zip(batch.tokens, single.tokens, strict=True)]
    assert all(equal)
    on_cpu = ask(make(), 3, generator=torch.Generator().manual_seed(1), seed=None)
    on_gpu = ask(pipe, 3, generator=torch.Generator().manual_seed(1), seed=None)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu.tokens, on_gpu.tokens, strict=True))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_graphs_give_the_tokens_of_eager(make) -> None:
    """Two calls each, so that the second one replays what the first one captured, with other seeds and prompts."""
    pipe, other = make().to("cuda"), make().to("cuda")
    other.executor = make_executor("graphs", other.device)
    for first in (0, 2, 0):
        assert same_tokens(ask(pipe, 2, first=first), ask(other, 2, first=first))
    for method in (DropGuidance(3), Truncate(1)):
        for first in (0, 2):
            expected, found = (ask(p, 2, first=first, method=method) for p in (pipe, other))
            assert same_tokens(expected, found), method
    assert other.executor.program.shelves, "something was captured"


@pytest.mark.parametrize("patchify", [False, True], ids=["cells", "patches"])
@pytest.mark.parametrize("name", ["nova", "nova, zero", "nova, early"])
def test_kernels_keep_what_the_cpu_keeps(name: str, patchify: bool) -> None:
    """Wide enough for the lens to have a kernel; with the caller's numbers, because a GPU draws others."""
    on_cpu, pipe = (tiny_infinity(patchify=patchify, width=64).to(device) for device in ("cpu", "cuda"))
    method = CAPTURED[name]

    def drawn(pipe):
        return ask(pipe, 2, method=method, generator=torch.Generator().manual_seed(1), seed=None)

    pairs = [(drawn(on_cpu), drawn(pipe))]
    expected = ask(pipe, 2, method=method)
    pipe.executor = make_executor("graphs", pipe.device)
    pairs += [(expected, ask(pipe, 2, method=method)) for _ in range(2)]
    for one, other in pairs:
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one.tokens, other.tokens, strict=True))
        kept = [[i["tokens_computed"] for i in out.trace.to_dict()["images"]] for out in (one, other)]
        assert kept[0] == kept[1]


def test_graphs_read_the_prompts_of_the_call_at_work() -> None:
    """In bfloat16, where our kernels run: prompts of other lengths than those that were captured."""
    pipe = Pipeline.from_pretrained(device="cuda", dtype="bfloat16", progress_bar=False)
    other = copy.copy(pipe)
    other.executor = make_executor("graphs", other.device)
    for prompt in ("a fox", "a red boat on the sea under a yellow moon", "a fox", "two cats"):
        tokens = pipe(prompt, seed=1, output_type="latent").tokens
        again = other(prompt, seed=1, output_type="latent").tokens
        same = [(a == b).float().mean().item() for a, b in zip(tokens, again, strict=True)]
        assert min(same[:4]) == 1.0, "the first scales are short enough to be the same"
        assert sum(same) / len(same) > 0.97


@pytest.mark.parametrize("make", [tiny_var, tiny_infinity, tiny_hart])
@pytest.mark.parametrize("name", CAPTURED)
def test_methods_in_graphs(make, name: str, monkeypatch) -> None:
    """Nothing between two scales' decisions waits for the GPU, and what is kept is what eager mode keeps."""
    pipe, other = make().to("cuda"), make().to("cuda")
    other.executor = graphs = make_executor("graphs", other.device)
    record = graphs.record

    def without_waiting(run, program):
        def checked(*pieces):
            torch.cuda.set_sync_debug_mode("error" if program.shelves else "default")  # compiling waits
            try:
                return run(*pieces)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return record(checked, program)

    monkeypatch.setattr(graphs, "record", without_waiting)
    for first in (0, 2, 0):
        expected, found = (ask(p, 2, first=first, method=CAPTURED[name]) for p in (pipe, other))
        kept = [[i["tokens_computed"] for i in r.trace.to_dict()["images"]] for r in (expected, found)]
        assert kept[0] == kept[1]
        assert same_tokens(expected, found)
    assert not graphs.reason


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
        pipe = Pipeline.from_pretrained(offload=offload, **options)
        before = torch.cuda.memory_allocated()
        pipe.encode_prompt("a fox")
        assert abs(torch.cuda.memory_allocated() - before) < nbytes / 10
        held[offload] = torch.cuda.memory_allocated()
        del pipe
    assert held[None] - held["text"] > 0.9 * nbytes
    assert all(torch.equal(a, b) for a, b in zip(*tokens.values(), strict=True))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_decoder_of_graphs(make) -> None:
    pipe, other = make().to("cuda"), make().to("cuda")
    other.executor = make_executor("graphs", other.device)
    a, b = (ask(p, 1, output_type="pt").images for p in (pipe, other))
    assert (a - b).abs().max() < 1e-3


def test_pictures_are_encoded_after_graphs_ran() -> None:
    """They put the encoder aside."""
    pipe, other = tiny_infinity().to("cuda"), tiny_infinity().to("cuda")
    other.executor = make_executor("graphs", other.device)
    picture = ask(other, 1, output_type="pt").images
    assert other.tokenizer.encoder.conv_in.weight.device.type == "cpu"
    expected, found = (p.encode(picture * 2 - 1) for p in (pipe, other))
    assert all(map(torch.equal, expected, found))
    assert ask(other, 1, output_type="pt").images.device.type == "cuda"


def test_graphs_notice_weights_that_are_not_finite() -> None:
    pipe = tiny_infinity().to("cuda")
    pipe.executor = make_executor("graphs", pipe.device)
    ask(pipe, 1)
    with torch.no_grad():
        pipe.backbone.blocks[1].mlp.fc1.weight[0, 0] = float("nan")
    with pytest.raises(NextscaleError, match=r"logits of scale 1 are not finite: the weights of blocks\.1\.mlp"):
        ask(pipe, 1)
