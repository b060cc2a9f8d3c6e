"""The Python API: what can be asked for, what comes back, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.pipelines import ask, embeds, same_tokens

from nextscale import NOVA
from nextscale.errors import NextscaleError
from nextscale.io.images import from_pil, to_pil
from nextscale.testing import tiny_infinity, tiny_var


def test_output_types(any_pipe) -> None:
    pil, array, tensor, latent = (ask(any_pipe, 2, output_type=t) for t in ("pil", "np", "pt", "latent"))
    assert same_tokens(pil, latent)
    side = any_pipe.schedule(pixel_budget="0.06M" if any_pipe.spec.pixel_budget else None).last[0]
    side *= any_pipe.tokenizer.stride
    assert pil.images[0].size == (side, side)
    assert tensor.images.shape == (2, 3, side, side)
    assert 0 <= tensor.images.min() <= tensor.images.max() <= 1
    assert np.array_equal(array.images, tensor.images.permute(0, 2, 3, 1).numpy())
    assert np.array_equal(np.asarray(pil.images[1]), (array.images[1] * 255).astype(np.uint8))
    assert to_pil(any_pipe.decode(latent.images))[0].tobytes() == pil.images[0].tobytes()
    assert pil.seeds == [139, 140]
    assert repr(any_pipe).startswith("Pipeline(tiny-")


def test_labels_in_every_spelling(var) -> None:
    expected = ask(var, 2)
    for labels in ([0, 1], (0, 1), torch.tensor([0, 1]), [np.int64(0), np.int64(1)]):
        assert same_tokens(expected, var(labels, seed=[139, 140]))
    assert same_tokens(ask(var, 1), var(0, seed=139))


def test_seeds(var) -> None:
    numbered, listed = var([1, 1, 1], seed=7), var([1, 1, 1], seed=[7, 8, 9])
    assert same_tokens(numbered, listed)
    assert numbered.seeds == [7, 8, 9]
    assert not torch.equal(numbered.tokens[-1][0], numbered.tokens[-1][1])
    one, two = var(1), var(1)
    assert one.seeds != two.seeds
    assert same_tokens(one, var(1, seed=one.seeds[0]))


def test_generators(var) -> None:
    def run(seed: int):
        return var([1, 2], generator=torch.Generator().manual_seed(seed))

    assert same_tokens(run(3), run(3))
    assert not same_tokens(run(3), run(4))
    assert run(3).seeds == [None, None]

    def each(*seeds: int):
        return var([1, 2], generator=[torch.Generator().manual_seed(s) for s in seeds])

    assert same_tokens(each(3, 4), each(3, 4))
    assert torch.equal(each(3, 4).tokens[-1][0], each(3, 5).tokens[-1][0])


def test_num_images_per_prompt(any_pipe) -> None:
    single = [ask(any_pipe, 1, first=i, seed=5 + 2 * i, num_images_per_prompt=2) for i in range(2)]
    both = ask(any_pipe, 2, seed=5, num_images_per_prompt=2)
    for k, tokens in enumerate(both.tokens):
        assert torch.equal(tokens, torch.cat([s.tokens[k] for s in single]))


def test_negative_prompts_change_only_the_unconditional_branch(infinity) -> None:
    def run(**options):
        raw = []
        infinity(
            prompt_embeds=embeds(5, 7),
            seed=1,
            pixel_budget="0.06M",
            callback_on_scale_end=lambda e: raw.append(e.raw_logits),
            **options,
        )
        return raw[0]

    plain, negative = run(), run(negative_prompt_embeds=embeds(3, seed=8))
    assert torch.allclose(plain[:2], negative[:2], atol=1e-5)
    assert not torch.allclose(plain[2:], negative[2:], atol=1e-2)


def test_guidance_inside_the_network(infinity) -> None:
    outside = ask(infinity, guidance_layers=[0])
    inside = ask(infinity, guidance_layers=[-1])
    both = ask(infinity, guidance_layers=[0, -2])
    assert not same_tokens(outside, inside)
    assert not same_tokens(outside, both)


def test_force_tokens(any_pipe) -> None:
    full = ask(any_pipe, 2)
    forced = ask(any_pipe, 2, force_tokens=full.tokens[:4], seed=[139, 999])
    assert all(torch.equal(a, b) for a, b in zip(forced.tokens[:4], full.tokens[:4], strict=True))
    assert torch.equal(forced.tokens[-1][0], full.tokens[-1][0])  # the same seed goes on as if nothing was forced
    assert not torch.equal(forced.tokens[-1][1], full.tokens[-1][1])
    shared = ask(any_pipe, 2, force_tokens=[t[0] for t in full.tokens[:3]])
    assert torch.equal(shared.tokens[2][1], full.tokens[2][0])


def test_encode_then_force_reconstructs(any_pipe) -> None:
    images = ask(any_pipe, 2).images
    h = images[0].height
    tokens = any_pipe.encode(images)
    size = {"pixel_budget": None, "height": h, "width": h} if any_pipe.backbone.family == "infinity" else {}
    out = ask(any_pipe, 2, force_tokens=tokens, output_type="pt", **size)
    pixels = from_pil(images)
    encoded = any_pipe.tokenizer.encode(pixels, any_pipe.schedule(h, h))
    if any_pipe.backbone.family != "hart":  # which adds a residual of its own
        assert torch.allclose(out.images, any_pipe.decode(encoded.maps[-1]).add(1).div(2), atol=1e-5)
    there_and_back = np.asarray(to_pil(pixels)[1]).astype(int)
    assert abs(there_and_back - np.asarray(images[1])).max() <= 1  # truncated, as the official code does
    with pytest.raises(NextscaleError, match=r"(nearest are|only)"):
        any_pipe.encode(images[0].resize((17, 9)))
    with pytest.raises(NextscaleError, match="must have one size"):
        any_pipe.encode([images[0], images[0].resize((4, 4))])
    with pytest.raises(NextscaleError, match="images of 8x8 were given"):
        any_pipe.tokenizer.encode(torch.zeros(1, 3, 8, 8), any_pipe.schedule(h, h))


def test_smooth_sampling_is_for_codebooks(var, infinity) -> None:
    smooth = var(1, seed=2, smooth=True)
    assert torch.equal(smooth.tokens[0], var(1, seed=2).tokens[0])
    assert not same_tokens(smooth, var(1, seed=2))
    with pytest.raises(NextscaleError, match="predicts bits"):
        ask(infinity, smooth=True)


def test_greedy_needs_no_seed(any_pipe) -> None:
    assert same_tokens(ask(any_pipe, greedy=True, seed=1), ask(any_pipe, greedy=True, seed=2))
    assert same_tokens(ask(any_pipe, greedy=True), ask(any_pipe, top_k=1, top_p=0.0))


def test_trace_is_json(any_pipe, tmp_path: Path) -> None:
    out = ask(any_pipe, 2)
    out.trace.save(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data["model"] == any_pipe.spec.name
    assert [i["seed"] for i in data["images"]] == [139, 140]
    assert set(data["seconds"]) == {"text", "transformer", "decode", "total"}
    assert "100.0%" in out.trace.summary()


def test_progress_bar(capsys) -> None:
    pipe = tiny_var()
    pipe.progress_bar = True
    pipe(1)
    shown = capsys.readouterr()
    assert "tiny-var" in shown.err
    assert "8/8" in shown.err
    pipe.progress_bar = None  # nobody sees a bar in a pipe
    pipe(1)
    assert capsys.readouterr() == ("", "")


def test_a_pipeline_can_be_moved(var) -> None:
    moved = tiny_var().to("cpu", dtype=torch.bfloat16)
    assert moved.dtype == tiny_var().to(torch.bfloat16).dtype == torch.bfloat16
    assert moved(1, seed=0, output_type="pt").images.isfinite().all()
    back = moved.to(dtype="float32")
    weight, original = back.backbone.blocks[0].mlp.fc1.weight, var.backbone.blocks[0].mlp.fc1.weight
    assert torch.equal(weight, original.bfloat16().float())
    assert torch.equal(back.backbone.head_linear.weight, var.backbone.head_linear.weight), "was never rounded"


def test_numbers_of_other_libraries(infinity) -> None:
    expected = ask(infinity, guidance_scale=2.0)
    for two in (2, np.float32(2), torch.tensor(2.0), [2.0] * 7, torch.full((7,), 2.0)):
        assert same_tokens(expected, ask(infinity, guidance_scale=two))
    assert same_tokens(ask(infinity, guidance_layers=0), ask(infinity, guidance_layers=[0], force_tokens=None))


def test_outputs_are_ordinary_tensors_and_do_not_hold_the_model() -> None:
    import gc
    import weakref

    pipe = tiny_infinity()
    out = ask(pipe, output_type="latent", method=NOVA(t_est=2))
    out.tokens[0][0, 0] = 1
    assert not out.images.is_inference()
    held = weakref.ref(pipe.backbone)
    del pipe
    gc.collect()
    assert held() is None
    assert "Linear" not in repr(out.trace)


def test_autocast_of_the_caller_changes_nothing(any_pipe) -> None:
    expected = ask(any_pipe, output_type="latent")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ask(any_pipe, output_type="latent").images, expected.images)
        any_pipe.decode(expected.images)


def test_nan_in_the_tokenizer_is_named() -> None:
    pipe = tiny_var()
    pipe.tokenizer.decoder.conv_out.weight[0] = torch.nan
    with pytest.raises(NextscaleError, match=r"decoded image is not finite: the weights of decoder\.conv_out\.weight"):
        pipe(1)
    pipe.tokenizer.codebook.weight.fill_(torch.nan)
    with pytest.raises(NextscaleError, match=r"logits of scale 2 are not finite: .* a tokenizer weight"):
        pipe(1)


def test_a_tokenizer_with_one_level() -> None:
    pipe = tiny_var()
    pipe.tokenizer.config = dataclasses.replace(pipe.tokenizer.config, multipliers=(1,))
    assert pipe.estimate().decoder > 0
    with pytest.raises(NextscaleError, match="batch must be a whole number, at least 1"):
        pipe.estimate(batch=0)


def test_estimate(infinity) -> None:
    one, four = infinity.estimate(batch=1), infinity.estimate(batch=4)
    assert four.kv_cache == 4 * one.kv_cache
    rows, tokens = 2, infinity.schedule().tokens
    assert one.kv_cache == 2 * 4 * infinity.backbone.depth * rows * tokens * infinity.backbone.width
    assert one.weights == four.weights
    assert "GiB" in str(one)
    smaller = infinity.estimate(height=32, width=32)
    assert smaller.total < one.total


def test_estimated_cache_is_what_a_run_reserves(any_pipe, monkeypatch) -> None:
    from nextscale.runtime import eager

    runs = []
    original = eager.GenerationState

    def load(*args):
        runs.append(original(*args))
        return runs[-1]

    monkeypatch.setattr(eager, "GenerationState", load)
    pipe, reserved = any_pipe, []
    options = {"pixel_budget": pipe.spec.pixel_budget} if pipe.spec.pixel_budget else {}
    ask(pipe, 2, callback_on_scale_end=lambda e: reserved.append(sum(c.nbytes for c in runs[0].kv)), **options)
    assert set(reserved) == {pipe.estimate(batch=2).kv_cache}
    assert runs[0].kv == [], "freed before the decoder runs"


BAD_FOR_ALL = [
    ({"seed": 1, "generator": torch.Generator()}, "seed or generator, not both"),
    ({"seed": [1, 2, 3]}, "3 seeds were given for 1 images"),
    ({"generator": [torch.Generator()] * 2, "seed": None}, "2 generators were given for 1 images"),
    ({"output_type": "jpeg"}, "unknown output_type 'jpeg'; allowed: pil"),
    ({"num_images_per_prompt": 0}, "num_images_per_prompt must be a whole number, at least 1"),
    ({"top_k": -1}, "top_k \\(0 = off\\) must be a whole number, at least 0"),
    ({"top_p": 1.5}, "top_p must lie in"),
    ({"temperature": 0.0}, "temperature must be above 0"),
    ({"temperature": [1.0, 2.0]}, "temperature has 2 values"),
    ({"guidance_scale": [1.0]}, "guidance_scale has 1 values"),
    ({"guidance_scale": float("nan")}, "finite"),
    ({"guidance_layers": [-4]}, "between -3 and 0"),
    ({"guidance_layers": [1]}, "between -3 and 0"),
    ({"height": 100000, "width": 100000}, r"(not a size of the schedule table; the nearest are|16x16 only)"),
    ({"aspect_ratio": 1.1}, r"(aspect_ratio 1.1 .* is not supported; allowed: 0.333|16x16 only)"),
    ({"force_tokens": [torch.zeros(1, 9).long()]}, "force_tokens of scale 1 have shape"),
    ({"num_images_per_prompt": 10**9}, "GiB; make fewer at a time"),
    ({"num_images_per_prompt": True}, "num_images_per_prompt must be a whole number, at least 1"),
    ({"method": 5}, r"method must be a method such as NOVA\(\), not 5; by name: nova"),
    (
        {"method": "nova:magic"},
        "nova has no preset 'magic'; allowed: balanced, faithful, fast, literal, paper, or a file",
    ),
    ({"generator": 42, "seed": None}, "generator must be a torch.Generator or a list of them"),
    ({"seed": "x"}, "seed must be a whole number"),
    ({"guidance_scale": "strong"}, "guidance_scale must be a number or a list"),
    ({"temperature": "a"}, "temperature must be a number"),
    ({"temperature": 1e-39}, "guidance_scale or temperature is too extreme"),
    ({"guidance_scale": 3e38}, "(too extreme|finite)"),
    ({"top_p": "a"}, "top_p must be a number in"),
    ({"greedy": True, "smooth": True}, "contradict"),
    ({"height": "32", "width": 32}, r"\(in pixels\) must be a whole number"),
    ({"height": 0, "width": 32}, r"\(in pixels\) must be a whole number"),
    ({"force_tokens": [torch.tensor([[1.7]])]}, "must be whole numbers"),
    ({"force_tokens": ["x"]}, "must be a tensor of whole numbers"),
]


@pytest.mark.parametrize(("options", "match"), BAD_FOR_ALL, ids=[str(sorted(o)) for o, _ in BAD_FOR_ALL])
def test_bad_arguments(any_pipe, options, match: str) -> None:
    if any_pipe.backbone.family == "infinity":
        options = {"pixel_budget": None if "height" in options else "0.06M", **options}
    with pytest.raises(NextscaleError, match=match) as caught:
        ask(any_pipe, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("label", [-1, 10, 1.5, "cat", True, None, [], [3, 10], ""])
def test_bad_labels(var, label) -> None:
    with pytest.raises(NextscaleError, match=r"(from 0 to 9|no class label)"):
        var(label)


def test_bad_prompts(var, infinity) -> None:
    for options, match in (
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": ["a fox", "  "]}, "the prompt is empty"),
        ({"prompt": []}, "no prompt was given"),
        ({"prompt": 3}, "prompt must be text"),
        ({"prompt": ["a", 3]}, "prompt must be text"),
        ({}, "either a prompt or prompt_embeds"),
        ({"prompt": "a", "prompt_embeds": embeds(3)}, "either a prompt or prompt_embeds"),
        ({"prompt": "a"}, "no text encoder; pass prompt_embeds"),
        ({"prompt_embeds": embeds(3, dim=5)}, r"must be \[1..16, 128\] per image, not \[3, 5\]"),
        ({"prompt_embeds": embeds(17)}, r"must be \[1..16, 128\]"),
        ({"prompt_embeds": embeds(3), "negative_prompt_embeds": embeds(1, 2, 3)}, "allowed: 1 or 1"),
        ({"prompt_embeds": embeds(3), "negative_prompt_embeds": embeds(1), "negative_prompt": "x"}, "not both"),
        ({"prompt_embeds": embeds(3), "height": 32}, "both height and width"),
        ({"prompt_embeds": embeds(3), "height": 32, "width": 32, "pixel_budget": "0.06M"}, "both height and width"),
        ({"prompt_embeds": 3}, "must be a tensor or a list of tensors"),
        ({"prompt_embeds": embeds(3), "pixel_budget": "2M"}, "unknown pixel budget '2M'; allowed: 0.06M"),
        ({"prompt_embeds": embeds(3), "aspect_ratio": 0}, "not a height/width ratio"),
        ({"prompt_embeds": embeds(3), "force_tokens": [torch.full((1, 4), 2)]}, "must lie in 0..1"),
    ):
        with pytest.raises(NextscaleError, match=match):
            infinity(**options)
    with pytest.raises(NextscaleError, match="no negative prompt"):
        var(1, negative_prompt="blurry")
    with pytest.raises(NextscaleError, match="16x16 only"):
        var(1, pixel_budget="1M")
    with pytest.raises(NextscaleError, match="force_tokens has 9 scales, the schedule 8"):
        var(1, force_tokens=[torch.zeros(1)] * 9)


def test_a_longer_schedule_than_the_model_knows() -> None:
    pipe = tiny_infinity()
    pipe.backbone.config = dataclasses.replace(pipe.backbone.config, levels=7)
    with pytest.raises(NextscaleError, match="knows 7 scales, the schedule has 10"):
        pipe(prompt_embeds=embeds(3))
