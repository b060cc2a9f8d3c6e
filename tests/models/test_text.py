"""Prompts through a real T5 encoder (tiny, random weights, saved and loaded as transformers does)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.pipelines import embeds

from nextscale.errors import NextscaleError
from nextscale.models.text_conditioning import TextCondition
from nextscale.testing import tiny_hart, tiny_infinity
from nextscale.text.qwen2 import QwenEncoder
from nextscale.text.t5 import T5Encoder

transformers = pytest.importorskip("transformers")
WORDS = ["a", "red", "fox", "in", "the", "snow", "photo", "of", "two", "cats"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    path = tmp_path_factory.mktemp("t5")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(vocabulary), d_model=128, d_kv=16, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0
    )
    transformers.T5EncoderModel(config).save_pretrained(path)
    return path


def test_features_are_those_of_the_padded_official_call(folder: Path) -> None:
    """The official code pads to the full length and cuts afterwards; the result is the same."""
    encoder = T5Encoder(folder, max_length=16)
    prompts = ["a red fox", "photo of two cats in the snow"]
    rows = encoder.encode(prompts)
    assert [r.shape for r in rows] == [(4, 128), (8, 128)]  # the end token counts
    batch = encoder.tokenizer(prompts, padding="max_length", max_length=16, return_tensors="pt")
    with torch.no_grad():
        padded = encoder.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)[0]
    for row, full in zip(rows, padded, strict=True):
        assert torch.allclose(row, full[: len(row)], atol=1e-5)
    assert torch.allclose(encoder.encode(prompts[:1])[0], rows[0], atol=1e-5)
    assert encoder.encode([""])[0].shape == (1, 128)


def test_long_prompts_are_cut_with_a_warning(folder: Path, caplog) -> None:
    rows = T5Encoder(folder, max_length=5).encode(["a red fox in the snow"])
    assert len(rows[0]) == 5
    assert "cut to 5" in caplog.text


def test_prompts_through_the_pipeline(folder: Path) -> None:
    pipe = tiny_infinity()
    pipe.text_encoder = T5Encoder(folder, max_length=16)
    options = {"seed": 1, "pixel_budget": "0.06M"}
    out = pipe(["a red fox", "two cats"], negative_prompt="snow", **options)
    again = pipe(
        prompt_embeds=pipe.encode_prompt(["a red fox", "two cats"]),
        negative_prompt_embeds=pipe.encode_prompt("snow"),
        **options,
    )
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, again.tokens, strict=True))
    assert [i["prompt"] for i in out.trace.to_dict()["images"]] == ["a red fox", "two cats"]
    plain = pipe("a red fox", num_images_per_prompt=2, **options)
    empty = pipe("a red fox", num_images_per_prompt=2, negative_prompt="", **options)
    assert all(torch.equal(a, b) for a, b in zip(plain.tokens, empty.tokens, strict=True))
    assert not torch.equal(plain.tokens[-1][0], out.tokens[-1][0])


def test_an_encoder_on_the_host_is_fetched_to_encode(folder: Path, monkeypatch) -> None:
    """It is loaded when it is on its way already, with the dtype of the place where it will work."""
    from nextscale import Pipeline

    tiny, encoder = tiny_infinity(), T5Encoder(folder, max_length=16)
    pipe = Pipeline(tiny.backbone, tiny.tokenizer, tiny.spec, encoder, progress_bar=False, offload="text")
    assert encoder.model is None
    assert pipe.estimate().text_encoder == 0, "nobody knows the size of this one"
    first = pipe.encode_prompt("a red fox")[0]
    assert encoder.device.type == "cpu"
    assert pipe.estimate().text_encoder == encoder.nbytes > 0
    moved, original = [], encoder.model.to
    monkeypatch.setattr(encoder.model, "to", lambda device: moved.append(str(device)) or original(device))
    assert torch.equal(pipe.encode_prompt("a red fox")[0], first)
    assert moved == ["cpu", "cpu"], "there and back"
    assert encoder.dtype_on(torch.device("cuda")) == torch.float16
    assert encoder.dtype_on(torch.device("cpu")) == torch.float32


def test_text_norm_has_the_models_epsilon() -> None:
    """The documents say 1e-6; the official code takes it from the configuration."""
    import dataclasses

    backbone = tiny_infinity().backbone
    rows = [torch.randn(3, 128) * 1e-2]
    backbone.config = dataclasses.replace(backbone.config, eps=1e-2)
    text, _, mask = backbone.read(TextCondition(rows), guided=False)
    _, memory = backbone.read_text(text, mask)
    normed = rows[0] * torch.rsqrt(rows[0].square().mean(-1, keepdim=True) + 1e-2) * backbone.text_norm
    assert torch.allclose(memory[0], backbone.text_proj(normed), atol=1e-6)


@pytest.mark.parametrize(("length", "slots"), [(3, 8), (8, 8), (9, 16), (17, 40), (40, 40)])
def test_few_shapes_of_text(length: int, slots: int) -> None:
    """All it can read, behind the last of them; and always a mask, though nothing is padded."""
    backbone = tiny_infinity(text_length=40).backbone
    condition = TextCondition(embeds(length, 2), padded_lengths=(8, 16, 64))
    text, lengths, mask = backbone.read(condition, guided=True)
    assert text.shape[:2] == (4, slots)
    assert lengths.tolist() == [length, 2] * 2
    assert mask.sum((1, 2, 3)).tolist() == lengths.tolist()
    assert backbone.read(TextCondition(embeds(length), padded_lengths=(8, 16, 64)), guided=False)[2] is not None
    assert backbone.read(TextCondition(embeds(length)), guided=False)[2] is None


def test_an_encoder_of_the_wrong_width_is_named(folder: Path) -> None:
    pipe = tiny_infinity(text_dim=256)
    pipe.text_encoder = T5Encoder(folder)
    with pytest.raises(NextscaleError, match="features of width 128, but the model reads 256"):
        pipe("a fox")


def test_a_missing_encoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NextscaleError, match="could not be loaded") as caught:
        T5Encoder(tmp_path / "nowhere", local_files_only=True).encode(["a"])
    assert "\n" not in str(caught.value)


def test_without_transformers(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NextscaleError, match=r"pip install 'nextscale\[text\]'"):
        T5Encoder("any").encode(["a"])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """A tiny Qwen2 with a byte-level tokenizer that pads on the left."""
    path = tmp_path_factory.mktemp("qwen2")
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", "Ġ", *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[], padding_side="left")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.Qwen2Model(config).save_pretrained(path)
    return path


def test_qwen_fills_every_slot(qwen: Path, caplog) -> None:
    encoder = QwenEncoder(qwen, max_length=12)
    rows = encoder.encode(["a red fox", "two cats"])
    assert [r.shape for r in rows] == [(12, 129)] * 2
    assert rows[0][:, -1].tolist() == [-1, -1, -1, *range(9)]
    ids = encoder.tokenizer(["a red fox"], return_tensors="pt").input_ids
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), ids), dim=1)
    with torch.no_grad():
        whole = encoder.model(input_ids=padded, attention_mask=(padded != 0).long()).last_hidden_state[0]
    assert torch.allclose(rows[0][:, :-1], whole, atol=1e-5)
    assert torch.equal(encoder.encode(["a red fox"])[0], rows[0])
    assert not caplog.text
    led = QwenEncoder(qwen, max_length=12, instruction="photo of the").encode(["a red fox"])[0]
    assert "not the one of the official tools" in caplog.text
    assert torch.equal(led[:, -1], rows[0][:, -1])
    assert not torch.allclose(led[-3:], rows[0][-3:], atol=1e-3)
    QwenEncoder(qwen, max_length=2).encode(["a red fox"])
    assert "cut to 2" in caplog.text


def test_prompts_of_hart_through_the_pipeline(qwen: Path) -> None:
    pipe = tiny_hart()
    pipe.text_encoder = QwenEncoder(qwen, max_length=12)
    out = pipe(["a red fox", "two cats"], seed=1)
    given = pipe(prompt_embeds=pipe.encode_prompt(["a red fox", "two cats"]), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, given.tokens, strict=True))
    negative = pipe(["a red fox", "two cats"], seed=1, negative_prompt="snow")
    assert not torch.equal(out.tokens[-1], negative.tokens[-1])
    with pytest.raises(NextscaleError, match=r"must be \[1..12, 128\] per image, not \[5, 129\]"):
        pipe(prompt_embeds=torch.zeros(5, 129))
