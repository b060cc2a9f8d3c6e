from __future__ import annotations

import re
from pathlib import Path

import pytest

import nextscale.serve
from nextscale.errors import NextscaleError
from nextscale.methods.auto import best_method
from nextscale.pipeline import Pipeline
from nextscale.serve.engine import Engine
from nextscale.serve.jobs import ImageJob, InvalidJob
from nextscale.serve.served_model import MAX_KNOWN, ServedModel
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var


@pytest.fixture(scope="module")
def clipart() -> ServedModel:
    return ServedModel(Pipeline.from_pretrained(progress_bar=False))


def test_the_embedded_model_has_a_measured_method(clipart: ServedModel) -> None:
    balanced, fast = best_method("clipart"), best_method("clipart", "fast")
    assert (clipart.name, clipart.method) == ("clipart", balanced)
    assert clipart.qualities == {
        "low": fast,
        **dict.fromkeys(("medium", "auto", "standard", "high"), balanced),
        **dict.fromkeys(("hd", "xhigh", "max"), "none"),
    }
    other = ServedModel(clipart.pipe, name="other", method="truncate:2")
    assert (other.name, other.method, other.qualities["high"]) == ("other", "truncate:2", "truncate:2")
    with pytest.raises(NextscaleError, match="unknown method"):
        ServedModel(clipart.pipe, method="fast")


def test_small_images_are_made_plainly_where_the_method_needs_more_scales(clipart: ServedModel) -> None:
    served = ServedModel(clipart.pipe, method="nova:t_est=9")
    assert served.method_of("auto", (512, 512)) == "nova:t_est=9"
    assert served.method_of("auto", (256, 256)) == "none"


def test_a_model_without_a_measured_method_has_taper() -> None:
    assert ServedModel(tiny_infinity()).qualities == {
        "low": "taper:0.12",
        **dict.fromkeys(("medium", "auto", "standard", "high"), "taper"),
        **dict.fromkeys(("hd", "xhigh", "max"), "none"),
    }


def test_sizes_are_those_of_the_schedule_table(clipart: ServedModel) -> None:
    assert clipart.trained_sizes == [(512, 512)]
    assert clipart.sizes[0] == clipart.default_size == (512, 512)
    assert {(256, 256), (416, 624), (624, 416)} <= set(clipart.sizes)
    assert (1024, 1024) not in clipart.sizes  # beyond all training
    assert len(set(clipart.sizes)) == len(clipart.sizes)
    for width, height in clipart.sizes:
        assert clipart.pipe.schedule(height, width).last == (height // 8, width // 8)
    for pipe, side in ((tiny_var(), 16), (tiny_hart(), 16)):
        served = ServedModel(pipe)
        assert served.sizes == served.trained_sizes == [served.default_size] == [(side, side)]


def test_the_vocabulary_is_that_of_words(clipart: ServedModel) -> None:
    words = clipart.vocabulary
    assert words is not None
    assert "fox" in words["objects"]
    assert ServedModel(tiny_var()).vocabulary is None
    assert clipart.warnings(ImageJob("clipart", "a red fox", (1,))) == []
    unknown, size = clipart.warnings(ImageJob("clipart", "a red foks", (1,), width=256, height=256))
    assert unknown.startswith("left out, because the model does not know them: 'foks' (perhaps ")
    assert size == "clipart was trained for 512x512, so an image of 256x256 may look wrong"
    long = ImageJob("clipart", "fox " * 60, (1,), negative_prompt="a blue haus")
    cut, unread = clipart.warnings(long)
    assert cut == "a prompt of 60 known words is cut to the first 47"
    assert unread.startswith("negative prompt: left out, because the model does not know them: 'haus' (perhaps ")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"prompt": " \n"}, "the prompt is empty"),
        (
            {"prompt": "qwertz"},
            "the prompt names nothing that this model can draw: 'qwertz'; /v1/models/clipart lists what it knows",
        ),
        ({"prompt": "fox " * 9000}, "the prompt has 36000 characters; allowed: 32000"),
        ({"negative_prompt": "x" * 32001}, "the negative_prompt has 32001 characters; allowed: 32000"),
        ({"negative_prompt": "qwertz"}, "the negative_prompt names nothing that this model can draw: 'qwertz'"),
        ({"negative_prompt": " "}, "the negative_prompt names nothing that this model can draw: no words"),
        ({"height": 512, "width": 511}, "clipart makes no images of size 511x512; allowed: 512x512, "),
        ({"method": "nova:t_est=x"}, "nova: t_est must be"),
        ({"guidance_scale": float("inf")}, "guidance_scale must be"),
    ],
    ids=lambda value: "",
)
def test_what_can_never_be_made_is_refused(clipart: ServedModel, job: dict, message: str) -> None:
    asked = ImageJob(**{"model": "clipart", "prompt": "a fox", "seeds": (1,), **job})
    with pytest.raises(NextscaleError, match=f"^{message.replace('(', '.').replace(')', '.')}"):
        clipart.check(asked)


def test_batches_are_as_large_as_memory_allows(monkeypatch) -> None:
    served = ServedModel(tiny_var())
    one, two, three = (served.pipe.estimate(batch=n).total for n in (1, 2, 3))
    assert one < two < three
    monkeypatch.setattr("nextscale.serve.served_model.total_memory", lambda device: two)
    assert served.images_that_fit((16, 16), 8) == 2
    monkeypatch.setattr("nextscale.engine.memory.total_memory", lambda device: one - 1)
    with pytest.raises(NextscaleError, match=r"^1 images of 8 scales need about"):
        served.check(ImageJob("tiny-var", 1, (1,)))


def test_models_leave_room_for_each_other(monkeypatch) -> None:
    one, other = ServedModel(tiny_var()), ServedModel(tiny_hart(), name="other")
    need = one.pipe.estimate(batch=1).total
    assert 0 < other.own_bytes < other.pipe.estimate().total
    monkeypatch.setattr("nextscale.serve.served_model.total_memory", lambda device: need + other.own_bytes - 1)
    engine = Engine([one, other])
    assert (one.other_bytes, other.other_bytes) == (other.own_bytes, one.own_bytes)
    with pytest.raises(InvalidJob, match="does not fit into memory beside the other models"):
        engine.submit(ImageJob("tiny-var", 1, (1,)), print)
    monkeypatch.setattr("nextscale.serve.served_model.total_memory", lambda device: need)
    assert ServedModel(tiny_var()).images_that_fit((16, 16), 8) == 1


def test_times_of_scales_are_learned_and_forgotten(clipart: ServedModel) -> None:
    served = ServedModel(tiny_var())
    job = ImageJob("tiny-var", 1, (1,))
    assert served.expected_seconds(job) == [1, 4, 9, 16, 25, 36, 49, 64]
    served.observe_seconds(job, [1.0] * 8)
    served.observe_seconds(job, [2.0] * 8)
    assert served.expected_seconds(job) == pytest.approx([1.2] * 8)
    for n in range(2 * MAX_KNOWN):
        served.observe_seconds(ImageJob("tiny-var", 1, (1,), f"truncate:{n}"), [1.0] * 8)
    assert len(served.scale_seconds) == MAX_KNOWN
    served.observe_seconds(ImageJob("tiny-var", 1, (1,), f"truncate:{2 * MAX_KNOWN - 1}"), [1.0] * 8)
    assert len(served.scale_seconds) == MAX_KNOWN
    assert served.expected_seconds(job) == [1, 4, 9, 16, 25, 36, 49, 64]


def test_the_page_suggests_prompts_that_the_model_knows(clipart: ServedModel) -> None:
    page = (Path(nextscale.serve.__file__).parent / "page" / "page.js").read_text()
    examples = re.findall(r'"([^"]+)"', page.partition("words: [")[2].partition("]")[0])
    assert len(examples) == 5
    for prompt in examples:
        assert clipart.warnings(ImageJob("clipart", prompt, (1,))) == []
