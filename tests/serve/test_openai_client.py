"""The real client of OpenAI against live servers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs pip install openai")
pytest.importorskip("fastapi", reason="needs pip install 'nextscale[serve]'")

import openai
from live_server import BROKEN, FAULT, FINISHED, PREVIEW, Live, served
from PIL import Image

from nextscale.pipeline import Pipeline
from nextscale.serve.jobs import Draining, Failed, NoMemory, QueueFull
from nextscale.serve.served_model import ServedModel

PROMPT, SIZE = "a red fox", "128x128"  # quick


def connect(live: Live, **options: Any) -> Any:
    options = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True, **options}
    return openai.OpenAI(base_url=f"{live.url}/v1", **options)


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    with connect(live) as client:
        yield client


def image_of(item: Any) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(item.b64_json)))


def test_an_image(client: Any) -> None:
    before = int(time.time())
    answer = client.images.generate(prompt=PROMPT, extra_body={"seed": 7})
    assert before <= answer.created <= time.time()
    assert (answer.background, answer.output_format, answer.quality, answer.size) == (
        "opaque",
        "png",
        "high",
        "512x512",
    )
    assert image_of(answer.data[0]).size == (512, 512)
    usage, ours = answer.usage, answer.nextscale
    assert usage.input_tokens == usage.input_tokens_details.text_tokens > 0
    assert usage.input_tokens_details.image_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (ours["model"], ours["seeds"], ours["method"]) == ("clipart", [7], "truncate:5")
    assert ours["tokens"] == usage.output_tokens < ours["tokens_plain"]
    assert ours["seconds"] > 0 <= ours["queued"]
    settings = json.loads(image_of(answer.data[0]).text["nextscale"])
    assert (settings["seed"], settings["prompt"], settings["size"]) == (7, PROMPT, "512x512")


def test_every_field(client: Any) -> None:
    answer = client.images.generate(
        prompt=PROMPT,
        model="clipart",
        n=2,
        size=SIZE,
        quality="hd",
        output_format="webp",
        output_compression=40,
        background="auto",
        response_format="b64_json",
        stream=False,
        partial_images=3,
        moderation="low",
        style="vivid",
        complexity="low",
        user="somebody",
        safety_identifier="abc",
        extra_body={"seed": 5, "negative_prompt": "a blue house", "guidance_scale": 3.0},
    )
    assert (answer.output_format, answer.safety_identifier, answer.size) == ("webp", "abc", SIZE)
    assert answer.nextscale["seeds"] == [5, 6]
    assert answer.nextscale["method"] == "none"
    images = [image_of(item) for item in answer.data]
    assert [(p.format, p.size) for p in images] == [("WEBP", (128, 128))] * 2
    assert images[0].tobytes() != images[1].tobytes()


def test_an_image_depends_on_its_seed_alone(client: Any) -> None:
    options: dict[str, Any] = {"prompt": PROMPT, "size": SIZE}
    both = client.images.generate(**options, n=2, extra_body={"seed": 11})
    for item, seed in zip(both.data, (11, 12), strict=True):
        alone = client.images.generate(**options, extra_body={"seed": seed})
        assert alone.data[0].b64_json == item.b64_json
    drawn = {client.images.generate(**options).nextscale["seeds"][0] for _ in range(2)}
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("param", "value", "code"),
    [
        ("prompt", " ", "invalid_value"),
        ("prompt", "a", None),  # the model knows no such word
        ("n", 11, "invalid_value"),
        ("size", "513x512", "invalid_value"),
        ("quality", "best", "invalid_value"),
        ("output_format", "gif", "invalid_value"),
        ("output_compression", 101, "invalid_value"),
        ("background", "transparent", "invalid_value"),
        ("response_format", "url", "invalid_value"),
        ("partial_images", 4, "invalid_value"),
        ("seed", -1, "invalid_value"),
        ("method", "none such", None),
        ("method", "truncate:13", None),  # leaves nothing
        ("previews", "all", "invalid_value"),  # without a stream
        ("guidance_scale", "high", "invalid_value"),
        ("frame_count", 3, "unknown_parameter"),
    ],
)
def test_a_wrong_field_is_a_bad_request(client: Any, param: str, value: Any, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt=PROMPT, extra_body={param: value})
    error = caught.value
    assert error.type == "invalid_request_error"
    assert error.request_id
    if code is not None:
        assert (error.code, error.param) == (code, param)


def test_models(client: Any) -> None:
    models = client.models.list().data
    assert [(m.id, m.object, m.owned_by) for m in models] == [
        ("clipart", "model", "nextscale"),
        ("plain", "model", "nextscale"),
    ]
    one = client.models.retrieve("clipart")
    assert one.nextscale["default_size"] == one.nextscale["trained_sizes"][0] == "512x512"
    assert SIZE in one.nextscale["sizes"]
    assert (one.nextscale["family"], one.nextscale["scales"], one.nextscale["method"]) == ("infinity", 13, "truncate:5")
    assert "fox" in one.nextscale["vocabulary"]["objects"]
    for call in (client.models.retrieve, lambda name: client.images.generate(prompt=PROMPT, model=name)):
        with pytest.raises(openai.NotFoundError) as caught:
            call("gpt-image-2")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_two_models(client: Any, live: Live) -> None:
    options: dict[str, Any] = {"prompt": PROMPT, "size": SIZE, "extra_body": {"seed": 3}}
    quick, plain = (client.images.generate(model=name, **options) for name in ("clipart", "plain"))
    assert (quick.nextscale["model"], quick.nextscale["method"]) == ("clipart", "truncate:5")
    assert (plain.nextscale["model"], plain.nextscale["method"]) == ("plain", "none")
    assert quick.data[0].b64_json != plain.data[0].b64_json
    assert live.count("nextscale_images_finished_total", model="plain") >= 1


def check_stream(events: list[Any], partial: int, images: int = 1) -> None:
    assert [e.type for e in events[-1:]] == ["image_generation.completed"]
    for image in range(images):
        own = [e for e in events if getattr(e, "image_index", 0) == image]
        previews = own[:-1]
        assert [e.type for e in previews] == ["image_generation.partial_image"] * len(previews)
        assert [e.partial_image_index for e in previews] == list(range(len(previews)))
        assert len(previews) <= partial
        assert own[-1].type == "image_generation.completed"
        assert own[-1].usage.output_tokens > 0
    assert all(e.background == "opaque" and e.quality == "auto" and e.created_at for e in events)


@pytest.mark.parametrize("partial", range(4))
def test_stream(client: Any, partial: int) -> None:
    options: dict[str, Any] = {"prompt": PROMPT, "size": SIZE, "model": "plain", "extra_body": {"seed": 4}}
    events = list(client.images.generate(**options, stream=True, partial_images=partial, output_format="jpeg"))
    check_stream(events, partial)
    assert len(events) == partial + 1
    assert [image_of(e).format for e in events] == ["JPEG"] * len(events)
    once = client.images.generate(**options, output_format="jpeg")
    assert once.data[0].b64_json == events[-1].b64_json
    assert not any(hasattr(e, "nextscale") for e in events[:-1])
    assert {e.size for e in events} == {SIZE}


def test_a_stream_of_several_images(client: Any) -> None:
    stream = client.images.generate(
        prompt=PROMPT, size=SIZE, model="plain", n=2, stream=True, partial_images=2, extra_body={"seed": 8}
    )
    events = list(stream)
    check_stream(events, 2, images=2)
    assert sorted(e.image_index for e in events) == [0, 0, 0, 1, 1, 1]
    assert sorted(e.nextscale["seed"] for e in events if e.type.endswith("completed")) == [8, 9]


def test_previews_of_all_scales(client: Any) -> None:
    stream = client.images.generate(
        prompt=PROMPT, size=SIZE, stream=True, extra_body={"previews": "all", "method": "nova:t_est=3;alpha=0"}
    )
    events = list(stream)
    check_stream(events, 13)
    done = events[-1].nextscale
    assert [e.nextscale["scale"] for e in events[:-1]] == [s["scale"] for s in done["scales"][:-1]]
    for event in events[:-1]:
        ours = event.nextscale
        height, width = ours["grid"]
        assert len(base64.b64decode(ours["computed"])) == height * width
        assert ours["seconds"] > 0
        assert ours["scale"] <= ours["scales"]
        assert image_of(event).width > 0
    for entry, event in zip(done["scales"][:-1], events[:-1], strict=True):
        assert entry["grid"] == event.nextscale["grid"]
        assert base64.b64decode(entry["computed"]) == base64.b64decode(event.nextscale["computed"])


def test_asynchronous_requests(live: Live) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
            calls = [client.images.generate(prompt=PROMPT, size=SIZE, extra_body={"seed": seed}) for seed in range(4)]
            return await asyncio.gather(*calls)

    assert [answer.nextscale["seeds"] for answer in asyncio.run(ask())] == [[0], [1], [2], [3]]


def test_closing_a_stream_cancels(client: Any, live: Live) -> None:
    canceled, finished = (
        live.count("nextscale_requests_canceled_total"),
        live.count("nextscale_images_finished_total", model="plain"),
    )
    with client.images.generate(prompt=PROMPT, model="plain", stream=True, extra_body={"previews": "all"}) as stream:
        assert next(iter(stream)).nextscale["scale"] == 1
    assert live.wait_for(lambda: live.count("nextscale_requests_canceled_total") == canceled + 1)
    assert live.wait_for(lambda: not live.engine.running)
    assert live.count("nextscale_images_finished_total", model="plain") == finished


def test_a_timeout_cancels(live: Live) -> None:
    canceled = live.count("nextscale_requests_canceled_total")
    with connect(live, timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
        client.images.generate(prompt=PROMPT, model="plain")
    assert live.wait_for(lambda: live.count("nextscale_requests_canceled_total") == canceled + 1)
    assert live.wait_for(lambda: not live.engine.running)


def test_retries_come_when_they_are_told_to(scripted: Live) -> None:
    scripted.engine.script = [QueueFull(64, 0.3), QueueFull(64, 0.02), FINISHED]
    with connect(scripted, max_retries=2) as client:
        assert client.images.generate(prompt="1").nextscale["seeds"] == [7]
    first, second, third = scripted.engine.times
    assert second - first >= 0.3  # the client's own pause would be longer than the second
    assert 0.02 <= third - second < 0.3


def test_a_full_queue(scripted: Live) -> None:
    scripted.engine.script = [QueueFull(64, 1.25)]
    with connect(scripted) as client, pytest.raises(openai.RateLimitError) as caught:
        client.images.generate(prompt="1", stream=True)
    error = caught.value
    assert (error.type, error.code, error.param) == ("rate_limit_error", "queue_full", None)
    assert error.response.headers["retry-after-ms"] == "1250"
    assert error.response.headers["retry-after"] == "2"
    assert error.response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("state", "code"), [("draining", "shutting_down"), ("loading", "loading")])
def test_a_server_that_is_not_ready(scripted: Live, state: str, code: str) -> None:
    scripted.engine.state = state
    scripted.engine.script = [Draining("not now", 2.0)]
    with connect(scripted) as client, pytest.raises(openai.InternalServerError) as caught:
        client.images.generate(prompt="1")
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (503, code, "server_error")
    assert caught.value.response.headers["retry-after-ms"] == "2000"


@pytest.mark.parametrize("script", [[FAULT], [PREVIEW, FAULT], [BROKEN]])
def test_a_fault_of_ours_keeps_its_details(scripted: Live, script: list[Any], caplog: Any) -> None:
    scripted.engine.script = script
    with connect(scripted) as client, pytest.raises(openai.InternalServerError) as caught:
        client.images.generate(prompt="1", extra_headers={"x-request-id": "mine-1"})
    error = caught.value
    assert (error.status_code, error.code, error.request_id) == (500, "internal_error", "mine-1")
    assert "secret" not in error.response.text
    assert "mine-1" in error.response.text
    assert "mine-1" in caplog.text
    assert "a secret of the server" in caplog.text


def test_no_memory(scripted: Live) -> None:
    scripted.engine.script = [Failed(NoMemory("too large for the device"))]
    with connect(scripted) as client, pytest.raises(openai.InternalServerError) as caught:
        client.images.generate(prompt="1")
    assert (caught.value.status_code, caught.value.code) == (503, "out_of_memory")


@pytest.mark.parametrize(
    ("end", "code"),
    [(FAULT, "internal_error"), (BROKEN, "internal_error"), (Failed(Draining("stopped")), "shutting_down")],
)
def test_a_failure_in_a_stream(scripted: Live, end: Any, code: str) -> None:
    scripted.engine.state = "draining"
    scripted.engine.script = [PREVIEW, end]
    with connect(scripted) as client:
        stream = client.images.generate(prompt="1", stream=True, partial_images=1)
        assert next(iter(stream)).partial_image_index == 0
        with pytest.raises(openai.APIError) as caught:
            next(iter(stream))
    assert (caught.value.code, caught.value.type) == (code, "server_error")
    assert "secret" not in str(caught.value)


def test_keys(var: Pipeline) -> None:
    with served([ServedModel(var, "small")], api_key="right") as live:
        with connect(live, api_key="right") as client:
            assert client.images.generate(prompt="1").data
            assert client.models.list().data
        for key in ("wrong", "righ", "r", "rightt"):
            with connect(live, api_key=key) as client:
                for call in (client.models.list, lambda client=client: client.images.generate(prompt="1")):
                    with pytest.raises(openai.AuthenticationError) as caught:
                        call()
                    assert (caught.value.type, caught.value.code) == ("authentication_error", "invalid_api_key")


def test_what_is_not_as_expected_is_said(client: Any) -> None:
    """Beside the image, for nobody reads the server's log."""
    answer = client.images.generate(prompt="a red foks and a fox", size=SIZE)
    words, size = answer.nextscale["warnings"]
    assert words.startswith("left out, because the model does not know them: 'foks' (perhaps")
    assert size.startswith("clipart was trained for 512x512, so an image of 128x128 may")
    *_, end = client.images.generate(prompt=PROMPT, stream=True, partial_images=1)
    assert end.nextscale["warnings"] == []


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"prompt": "qwertz"}, "prompt", "the prompt names nothing that this model can draw: 'qwertz'"),
        ({"extra_body": {"negative_prompt": "qwertz"}}, "negative_prompt", "the negative_prompt names nothing that"),
        ({"extra_body": {"method": "truncate:13"}}, "method", "truncate: k = 13 leaves nothing of a schedule"),
        ({"extra_body": {"method": "nova:t_est=9"}, "size": SIZE}, "method", "nova: t_est = 9 needs a schedule of at"),
    ],
    ids=["words", "negative", "too short", "too small"],
)
def test_what_only_the_model_knows_is_refused_before_the_stream(client: Any, asked, param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(**{"prompt": PROMPT, "stream": True, **asked})
    assert caught.value.param == param
    assert caught.value.body["message"].startswith(message)
