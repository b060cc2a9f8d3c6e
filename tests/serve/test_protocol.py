"""The border: what a body may say, in which sentence the rest is refused, and which bytes an image has."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs pip install 'nextscale[serve]'")

from PIL import Image

from nextscale.pipeline import Pipeline
from nextscale.serve.errors import ApiError, as_ascii
from nextscale.serve.jobs import Finished, ImageJob
from nextscale.serve.protocol import CheckedRequest, ImageRequest, encode, images_response, read_request
from nextscale.serve.served_model import ServedModel
from nextscale.version import __version__

# Field: what is refused.
WRONG: dict[str, list[Any]] = {
    "prompt": [None, 1, True, [], ["a"], {}, "", "  \n", "a" * 32_001, "a\ud800"],
    "model": [1, [], {}, False],
    "n": [0, 11, -1, 1.0, "1", True, [], 10**30],
    "size": ["", "512", "512X512", "512x512 ", "0x0", "-1x512", "512x513", 512, [512, 512], "9" * 5000],
    "quality": ["", "best", "HIGH", 1, True, []],
    "output_format": ["gif", "svg", "PNG", "jpg", 1, []],
    "output_compression": [-1, 101, 50.0, "50", True],
    "background": ["transparent", "red", 1],
    "response_format": ["url", "base64", 1],
    "stream": ["true", 1, 0, []],
    "partial_images": [-1, 4, 1.5, "all", True],
    "user": [1, [], "u" * 257],
    "safety_identifier": [1, {}, "u" * 257],
    "moderation": [1],
    "style": [False],
    "complexity": [[]],
    "seed": [-1, 2**63, 1.5, "1", True],
    "negative_prompt": [1, [], "a" * 32_001, "\udfff"],
    "guidance_scale": ["4", True, [], 10**390],
    "method": [1, [], True, "nova:../../etc/passwd", "skipvar:decision=/etc/passwd", "nova:\\u002fetc", "nova:mine"],
    "previews": ["some", 3, True, []],
}
FILES = (
    "nova:preset.json",
    "nova:folder/preset",
    "nova:./preset",
    "nova:preset",
    'nova:"preset"',
    "truncate:1+nova:preset",
    "nova:preset;alpha=0.4",
    "skipvar:decision=preset",
    'skipvar:decision = "preset"',
    "random_selection:like=(nova:preset)",
    "random_selection:like=nova:preset",
    "fastvar:scale_table=table.json",
    "fastvar:8x",
)
STORED = (
    "none",
    "nova",
    "nova:balanced",
    "truncate:2",
    "nova:t_est=8;tau=1.5+drop_guidance:12",
    "skipvar:clipart-98",
    "skipvar:decision=clipart",
    "toprovar:clipart",
    'fastvar:scale_table="11/13:0.5 12/13:0.7"',
    "nova:alpha=1e-3",
    "nova:probe=lens",
)


@pytest.fixture(scope="module")
def model(infinity: Pipeline) -> ServedModel:
    return ServedModel(infinity, "tiny", "none")


def read(content: Any, *models: ServedModel) -> CheckedRequest:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return read_request(body, {model.name: model for model in models}, models[0])


def refused(content: Any, *models: ServedModel) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(content, *models)
    error = caught.value
    sentence = str(error)
    assert sentence.isprintable()
    assert len(sentence) <= 1000
    assert "pydantic" not in sentence
    assert "Traceback" not in sentence
    assert set(error.body["error"]) == {"message", "type", "param", "code"}
    assert as_ascii(error.body).isascii()
    return error


def test_every_field_has_wrong_values() -> None:
    assert set(WRONG) == set(ImageRequest.model_fields)


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_value_is_refused_in_a_sentence(field: str, model: ServedModel) -> None:
    for value in WRONG[field]:
        more = {"stream": True} if field == "previews" else {}
        error = refused({"prompt": "a red fox", **more, field: value}, model)
        assert (error.status, error.param) == (400, field), f"{value!r}: {error}"
        assert field in str(error) or field == "prompt", f"{value!r}: {error}"


def test_sentences(model: ServedModel) -> None:
    base = {"prompt": "a red fox"}
    sentences = {
        "prompt is missing; it must be a text of 1 to 32000 characters": {},
        "n must be a whole number from 1 to 10, not 0": {**base, "n": 0},
        "unknown field 'promt'; allowed: prompt, model,": {"promt": "a"},
        "unknown fields 'a', 'b'; allowed:": {**base, "a": 1, "b": 2},
        "prompt must be a text of 1 to 32000 characters, not one of 40000 characters": {"prompt": "a" * 40_000},
        "size '511x512' is not one of tiny; allowed: auto, 64x64, 56x70,": {**base, "size": "511x512"},
        'previews "all" needs "stream": true': {**base, "previews": "all"},
        "method and quality both choose a method": {**base, "method": "nova", "quality": "auto"},
        "output_compression below 100 needs output_format": {**base, "output_compression": 50},
        "the model 'gpt-image-2' is not served here; allowed: tiny": {**base, "model": "gpt-image-2"},
        "the last of 2 images would have seed 9223372036854775808": {**base, "n": 2, "seed": 2**63 - 1},
    }
    for sentence, content in sentences.items():
        assert sentence in str(refused(content, model))
    assert refused({**base, "model": "x"}, model).status == 404
    assert refused({**base, "model": "x"}, model).code == "model_not_found"
    assert refused({**base, "a\ud800\0b": 1}, model).code == "unknown_parameter"
    assert refused({**base, "x" * 100_000: 1}, model).code == "unknown_parameter"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"prompt"',
        b"1",
        b"{",
        b'{"prompt": "a"',
        b'{"prompt": "a"} {}',
        b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "a", "guidance_scale": NaN}',
        b'{"prompt": "a", "guidance_scale": -Infinity}',
        b'{"prompt": "a", "seed": ' + b"9" * 1_000_000 + b"}",
        b'{"prompt": "a", "guidance_scale": 1.' + b"9" * 1_000_000 + b"}",
        b"[" * 500_000,
        b'{"a":' * 150_000,
        b'{"prompt": "a\nb"}',
        b"\0" * 1000,
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, model: ServedModel) -> None:
    assert refused(body, model).code == "invalid_json"


def test_defaults_and_nulls(model: ServedModel) -> None:
    plain = read({"prompt": "a"}, model)
    nulls = read({"prompt": "a", **dict.fromkeys(set(WRONG) - {"prompt"})}, model)
    for asked in (plain, nulls):
        assert asked.job == ImageJob("tiny", "a", asked.job.seeds, "none", 64, 64)
        assert (asked.size, asked.quality, asked.output_format, asked.stream) == ("64x64", "auto", "png", False)
    assert plain.job.seeds != nulls.job.seeds


def test_everything_is_handed_on(model: ServedModel) -> None:
    content = {
        "prompt": "a\0b\u2028 <script>",
        "model": "tiny",
        "n": 3,
        "size": "40x30",
        "output_format": "webp",
        "output_compression": 30,
        "background": "opaque",
        "response_format": "b64_json",
        "stream": True,
        "partial_images": 2,
        "user": "u",
        "seed": 2**63 - 3,
        "negative_prompt": "",
        "guidance_scale": 4,
        "method": "truncate:2",
    }
    seeds = (2**63 - 3, 2**63 - 2, 2**63 - 1)
    asked = read(content, model)
    assert asked.job == ImageJob("tiny", content["prompt"], seeds, "truncate:2", 30, 40, "", 4.0, 2)
    assert (asked.size, asked.output_format, asked.compression) == ("40x30", "webp", 30)
    assert asked.safety_identifier == "u"
    assert read({**content, "safety_identifier": "s"}, model).safety_identifier == "s"
    assert read({**content, "previews": "all"}, model).job.previews == "all"
    assert read({**content, "stream": False}, model).job.previews == 0


def test_quality_chooses_the_method(model: ServedModel) -> None:
    model = ServedModel(model.pipe, "clipart", "nova:paper")
    model.qualities["low"] = "nova:fast"
    chosen = {quality: read({"prompt": "a", "quality": quality}, model) for quality in model.qualities}
    methods = {quality: asked.job.method for quality, asked in chosen.items()}
    assert methods == model.qualities
    assert (methods["low"], methods["auto"], methods["max"]) == ("nova:fast", "nova:paper", "none")
    assert {quality: asked.quality for quality, asked in chosen.items() if asked.quality != quality} == {
        "standard": "high",
        "hd": "xhigh",
    }


@pytest.mark.parametrize("method", FILES)
def test_no_file_is_opened(method: str, model: ServedModel, tmp_path, monkeypatch) -> None:
    """Neither one that is there nor one that is not: the answer would tell which."""
    monkeypatch.chdir(tmp_path)
    absent = refused({"prompt": "a", "method": method}, model)
    for name in ("preset", "preset.json", "table.json", "8x"):
        (tmp_path / name).write_text('{"schema": 1, "name": "nova", "fields": {}}')
    os.mkdir("folder")
    assert str(refused({"prompt": "a", "method": method}, model)) == str(absent)


@pytest.mark.parametrize("method", STORED)
def test_stored_settings_are_taken(method: str, model: ServedModel) -> None:
    assert read({"prompt": "a", "method": method}, model).job.method == method


def test_class_numbers(var: Pipeline) -> None:
    model = ServedModel(var, "small")
    assert read({"prompt": " 7 "}, model).job.prompt == 7
    for prompt in ("a red fox", "-1", "1.5", "７", "9" * 5000, "1_0"):
        assert refused({"prompt": prompt}, model).param == "prompt"


def finished(pixels: np.ndarray) -> Finished:
    return Finished(0, lambda: pixels, 7, "none", 10, 20, 1, 0.1, 0.0)


def test_an_image_holds_its_settings_and_no_time(model: ServedModel) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 48, 3), dtype=np.uint8)
    asked = read({"prompt": "ein Füchslein \U0001f98a\0", "seed": 7, "guidance_scale": 3.5}, model)
    data = encode(asked, finished(pixels))
    assert data == encode(asked, finished(pixels.copy()))
    image = Image.open(io.BytesIO(data))
    assert np.array_equal(np.asarray(image), pixels)
    assert json.loads(image.text["nextscale"]) == {
        "nextscale": __version__,
        "model": "tiny",
        "prompt": "ein Füchslein \U0001f98a\0",
        "seed": 7,
        "size": "64x64",
        "method": "none",
        "guidance_scale": 3.5,
    }
    assert data.count(b"iTXt") == 1
    assert b"tEXt" not in data


def test_formats_and_compression(model: ServedModel) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 48, 3), dtype=np.uint8)
    for output_format in ("jpeg", "webp"):
        sizes = []
        for compression in (0, 50, None, 100):
            content = {"prompt": "a", "output_format": output_format, "output_compression": compression}
            data = encode(read(content, model), finished(pixels))
            image = Image.open(io.BytesIO(data))
            assert (image.format, image.size) == (output_format.upper(), (48, 64))
            sizes.append(len(data))
        assert sizes == sorted(sizes)
        assert len(set(sizes)) == 4


def test_the_answer_survives_any_text(model: ServedModel) -> None:
    asked = read({"prompt": "a", "user": "\0\u2028\x7f"}, model)
    asked = dataclasses.replace(asked, safety_identifier="\ud800")
    answer = as_ascii(images_response(asked, [finished(np.zeros((1, 1, 3), np.uint8))], ["AAAA"]))
    assert answer.isascii()
    assert json.loads(answer)["safety_identifier"] == "\ud800"
