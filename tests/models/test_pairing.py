"""Files and sizes that fit a model by their shapes, and yet are not its own."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from support import files
from support.files import CASE_2B
from support.pipelines import embeds

from nextscale import Pipeline
from nextscale.checkpoints.families import backbones
from nextscale.checkpoints.files import open_states
from nextscale.checkpoints.pretrained import official_part
from nextscale.engine.schedule import infinity_schedule, is_far
from nextscale.errors import NextscaleError
from nextscale.models.registry import MODELS


@pytest.fixture
def small_2b(monkeypatch) -> None:
    """Infinity-2B of a size for tests, under its published names."""
    part = official_part(open_states(CASE_2B / "state.safetensors"), backbones())
    spec = dataclasses.replace(MODELS["infinity-2b"], backbone=part.config)
    monkeypatch.setitem(MODELS, "infinity-2b", spec)


def test_the_tokenizer_without_reg_is_refused(small_2b, tmp_path: Path, caplog) -> None:
    weights = files.flat(tmp_path, CASE_2B, "infinity_2b_reg.pth")
    wrong = files.tokenizer(tmp_path, CASE_2B, "infinity_vae_d32.pth")
    with pytest.raises(NextscaleError, match=r"pass vae= with the file of the tokenizer, e.g. infinity_vae_d32reg.pth"):
        Pipeline.from_pretrained(weights)
    match = r"infinity_vae_d32.pth is not the tokenizer of infinity-2b, .*: pass vae= with infinity_vae_d32reg.pth"
    with pytest.raises(NextscaleError, match=match):
        Pipeline.from_pretrained(weights, vae=wrong)
    for name in ("infinity_vae_d32reg.pth", "infinity_vae_d32_reg.pth", "renamed.pth"):
        right = files.tokenizer(tmp_path, CASE_2B, name)
        assert Pipeline.from_pretrained(weights, vae=right).spec.name == "infinity-2b"
    assert Pipeline.from_pretrained(weights).spec.name == "infinity-2b", "the right one beside the wrong one"
    assert not caplog.records


def test_weights_trained_further_may_have_another_tokenizer(small_2b, tmp_path: Path, caplog) -> None:
    weights = files.flat(tmp_path, CASE_2B, "mine.pth")
    other = files.tokenizer(tmp_path, CASE_2B, "infinity_vae_d32.pth")
    assert Pipeline.from_pretrained(weights, vae=other).spec.name == "infinity-2b"
    (record,) = caplog.records
    assert record.getMessage() == (
        "infinity-2b was published with the tokenizer infinity_vae_d32reg.pth; with infinity_vae_d32.pth images are "
        "right only if mine.pth was trained with it"
    )


@pytest.mark.parametrize(
    ("asked", "trained", "far"),
    [
        ("0.06M", "1M", True),
        ("0.25M", "1M", True),
        ("0.60M", "1M", False),
        ("1M", "1M", False),
        ("0.25M", "0.25M", False),
        ("0.60M", "0.25M", True),
        ("1M", "0.06M", True),
    ],
)
def test_which_sizes_are_far(asked: str, trained: str, far: bool) -> None:
    for ratio in (1.0, 0.5, 3.0):
        assert is_far(infinity_schedule(ratio, asked), trained) is far


def test_a_size_far_from_training_is_warned_of_once(infinity, caplog) -> None:
    published = dataclasses.replace(infinity.spec, name="big", weights="big.pth", pixel_budget="1M")
    pipe = Pipeline(infinity.backbone, infinity.tokenizer, published, progress_bar=False)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        pipe(prompt_embeds=embeds(3), pixel_budget="0.06M", seed=0)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["big was trained for images of about 1M pixels, so one of 32x32 may look wrong"]
    caplog.clear()
    near = Pipeline(infinity.backbone, infinity.tokenizer, dataclasses.replace(published, pixel_budget="0.06M"))
    near(prompt_embeds=embeds(3), pixel_budget="0.06M", seed=0)
    unknown = dataclasses.replace(published, weights="")  # nobody told what it was trained for
    Pipeline(infinity.backbone, infinity.tokenizer, unknown)(prompt_embeds=embeds(3), pixel_budget="0.06M", seed=0)
    assert not caplog.records
