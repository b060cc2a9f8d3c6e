"""What a run is expected to take against what it takes, and a text encoder that rests on the host."""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
import weakref
from pathlib import Path

import pytest
import torch
from support.pipelines import ask, embeds, same_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nextscale import Pipeline
from nextscale.engine.memory import GIB, Estimate, estimate
from nextscale.errors import NextscaleError
from nextscale.testing import tiny_infinity, tiny_var
from nextscale.text.t5 import T5Encoder

UNGUIDED = {"var": 0.0, "infinity": 1.0, "hart": 0.0}
ROOT = Path(__file__).parents[2]


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_iter(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self.known and storage.data_ptr() not in given:
                self.known.add(storage)
                weakref.finalize(storage, self.gone, storage.nbytes())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
        return made

    def gone(self, nbytes: int) -> None:
        self.live -= nbytes


@pytest.mark.parametrize("guided", [True, False], ids=["guided", "unguided"])
@pytest.mark.parametrize("name", ["var", "infinity", "hart"])
def test_totals_are_what_a_run_takes(name: str, guided: bool, request) -> None:
    """Up to decoding, whose convolutions take what they need from elsewhere."""
    pipe = request.getfixturevalue(name)
    scale = None if guided else UNGUIDED[name]
    with Peak() as used:
        ask(pipe, 2, guidance_scale=scale, output_type="latent")
    schedule = pipe.schedule(pixel_budget="0.06M" if pipe.spec.pixel_budget else None)
    expected = estimate(pipe.backbone, pipe.tokenizer, schedule, 2, guided, text_length=4)
    assert 0.75 < used.peak / dataclasses.replace(expected, decoder=0).total < 1


def test_phases_of_a_call() -> None:
    made = Estimate(weights=100, text=1, kv_cache=20, blocks=3, decoder=7, text_encoder=50)
    assert made.total == 100 + 50 + 24
    assert dataclasses.replace(made, decoder=40).total == 100 + 50 + 40
    assert dataclasses.replace(made, offload=True).total == 100 + 50
    assert dataclasses.replace(made, offload=True, decoder=60).total == 100 + 60
    assert "text_encoder 0.00 GiB" in str(made)


class FakeEncoder:
    """Says where it was sent, and where it was when it encoded."""

    nbytes = 12345

    def __init__(self) -> None:
        self.happened: list = []
        self.device = "nowhere"

    def to(self, device) -> None:
        self.device = str(device)
        self.happened.append(self.device)

    def encode(self, prompts):
        self.happened.append(f"encodes on {self.device}")
        if "fail" in prompts:
            raise RuntimeError("no")
        return embeds(*(3 for _ in prompts))


def offloaded(encoder, **options) -> Pipeline:
    pipe = tiny_infinity()
    return Pipeline(pipe.backbone, pipe.tokenizer, pipe.spec, encoder, progress_bar=False, offload="text", **options)


def test_the_encoder_rests_on_the_host(monkeypatch) -> None:
    pipe = offloaded(FakeEncoder())
    encoder = pipe.text_encoder
    assert encoder.happened == ["cpu"]
    monkeypatch.setattr(Pipeline, "device", property(lambda self: torch.device("meta")))
    for prompts, raises in (["a"], None), (["fail"], RuntimeError):
        encoder.happened.clear()
        if raises is None:
            pipe.encode_prompt(prompts)
        else:
            with pytest.raises(raises):
                pipe.encode_prompt(prompts)
        assert encoder.happened == ["meta", "encodes on meta", "cpu"]


def test_an_encoder_that_is_not_offloaded_stays() -> None:
    pipe = offloaded(FakeEncoder())
    pipe.offload = None
    pipe.text_encoder.happened.clear()
    pipe.encode_prompt("a")
    assert pipe.text_encoder.happened == ["encodes on cpu"]
    pipe.to("cpu")
    assert pipe.text_encoder.happened[1:] == ["cpu"]
    pipe.offload = "text"
    pipe.to("cpu")
    assert pipe.text_encoder.happened[2:] == [], "it is fetched when it is needed"


def test_images_are_the_same_with_offload() -> None:
    plain, resting = tiny_infinity(), offloaded(FakeEncoder())
    plain.text_encoder = FakeEncoder()
    options = {"seed": 1, "pixel_budget": "0.06M", "negative_prompt": "b"}
    assert same_tokens(plain("a", **options), resting("a", **options))
    assert resting.text_encoder.device == "cpu"


def test_threads_do_not_take_the_encoder_from_each_other(monkeypatch) -> None:
    class Slow(FakeEncoder):
        def encode(self, prompts):
            import time

            before = self.device
            time.sleep(0.01)
            assert self.device == before == "meta"
            return embeds(3)

    pipe, failed = offloaded(Slow()), []
    monkeypatch.setattr(Pipeline, "device", property(lambda self: torch.device("meta")))

    def call() -> None:
        try:
            pipe.encode_prompt("a")
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_estimates_know_the_encoder() -> None:
    pipe = tiny_infinity()
    bare = pipe.estimate()
    pipe.text_encoder = FakeEncoder()
    with_encoder = pipe.estimate()
    assert with_encoder.text_encoder == 12345
    assert with_encoder.total == bare.total + 12345
    pipe.offload = "text"
    assert pipe.estimate().total == bare.total, "generating takes more than the encoder"
    pipe.text_encoder.nbytes = 10**9
    assert pipe.estimate().total == bare.weights + 10**9


def test_an_encoder_that_is_not_loaded_yet_counts_when_it_is_needed(monkeypatch) -> None:
    pipe = tiny_infinity()
    pipe.text_encoder = T5Encoder("google/flan-t5-xl", 16, dtype=torch.float16)
    assert pipe.text_encoder.nbytes == 0
    assert pipe.estimate().text_encoder / GIB == pytest.approx(2.28, abs=0.01)
    monkeypatch.setattr("nextscale.engine.memory.total_memory", lambda device: GIB)
    with pytest.raises(NextscaleError, match=r"need about 2 GiB, but cpu has 1 GiB"):
        pipe("a fox", pixel_budget="0.06M")
    pipe(prompt_embeds=embeds(3), pixel_budget="0.06M", seed=1, output_type="latent")
    assert pipe.estimate().text_encoder == 2 * 1_223_527_424


def test_only_text_can_be_offloaded() -> None:
    with pytest.raises(NextscaleError, match="unknown offload 'all'; allowed: text"):
        Pipeline.from_pretrained(offload="all")
    pipe = Pipeline.from_pretrained(offload="text", progress_bar=False)
    resting = pipe.encode_prompt("a fox")
    pipe.offload = None
    assert torch.equal(pipe.encode_prompt("a fox")[0], resting[0])
    assert tiny_var().offload is None


def test_a_model_in_8_bits_comes_block_by_block(monkeypatch) -> None:
    """So that a small card never holds it as a whole before it is small."""
    from nextscale.kernels.fp8 import FP8Layer
    from nextscale.models.fp8 import to_fp8

    pipe = tiny_infinity(width=64).to(torch.bfloat16)
    rounded_before = []
    blocks = list(pipe.backbone.blocks)
    original = torch.nn.Module.to

    def to(module, *where):
        if module in blocks:
            earlier = blocks[: blocks.index(module)]
            rounded_before.append(all(any(isinstance(m, FP8Layer) for m in b.modules()) for b in earlier))
        return original(module, *where)

    monkeypatch.setattr(torch.nn.Module, "to", to)
    to_fp8(pipe.backbone, pipe.tokenizer, torch.device("cpu"))
    assert rounded_before == [True] * len(blocks)


def test_the_table_of_what_fits_is_the_one_in_the_documents() -> None:
    spec = importlib.util.spec_from_file_location("fits", ROOT / "benchmarks" / "fits.py")
    fits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fits)
    assert fits.table() in (ROOT / "docs" / "performance.md").read_text()
