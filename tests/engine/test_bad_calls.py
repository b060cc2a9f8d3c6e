"""Every public argument with every kind of nonsense: it works, or one sentence says what is allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.pipelines import embeds

from nextscale import Pipeline
from nextscale.errors import NextscaleError
from nextscale.methods import METHODS, Compose
from nextscale.methods.base import Method
from nextscale.testing import tiny_infinity, tiny_var


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


SOUP = [
    None,
    "x",
    "",
    "a\nb" * 500,
    -1,
    0,
    1,
    1.5,
    math.nan,
    math.inf,
    10**30,
    10**400,
    -(10**30),
    [],
    [None],
    ["x"],
    [1.5],
    (1, 2),
    {},
    {"x": 1},
    object(),
    Unprintable(),
    np.float64(2.0),
    np.float32("nan"),
    np.int64(3),
    np.array([1.0, 2.0]),
    np.bool_(True),
    torch.tensor(2),
    torch.tensor(1.5),
    torch.tensor([1.0, 2.0]),
    torch.tensor([1 + 2j]),
    torch.zeros(0),
    torch.zeros(2, 3),
    torch.zeros(1, 3, 4, 4, dtype=torch.uint8),
    torch.zeros(2).to_sparse(),
    b"x",
    b"",
    True,
    torch.float64,
    torch.device("meta"),
    Path("nowhere"),
]


@contextlib.contextmanager
def one_sentence(what: object) -> Iterator[None]:
    """Nothing else than a NextscaleError, which is short."""
    try:
        yield
    except NextscaleError as error:
        said = str(error)
        assert said, what
        assert "\n" not in said, what
        assert len(said) < 400, what
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def named(value: object) -> str:
    return type(value).__name__ if isinstance(value, (Unprintable, torch.Tensor)) else repr(value)[:40]


CALL = [
    "prompt",
    "negative_prompt",
    "num_images_per_prompt",
    "seed",
    "generator",
    "height",
    "width",
    "aspect_ratio",
    "pixel_budget",
    "guidance_scale",
    "temperature",
    "top_k",
    "top_p",
    "greedy",
    "smooth",
    "guidance_layers",
    "method",
    "force_tokens",
    "callback_on_scale_end",
    "output_type",
    "prompt_embeds",
    "negative_prompt_embeds",
]


@pytest.fixture(scope="module")
def pipes() -> list[Pipeline]:
    return [tiny_var(), tiny_infinity()]


def test_every_argument_of_a_call_is_tried() -> None:
    import inspect

    assert ["self", *CALL] == list(inspect.signature(Pipeline.__call__).parameters)


@pytest.mark.parametrize("name", CALL)
def test_calls(pipes, name: str) -> None:
    for pipe in pipes:
        usual: dict = {"callback_on_scale_end": lambda end: False, "output_type": "latent"}
        usual |= {"prompt": 1} if pipe.backbone.prompts == "label" else {"prompt_embeds": embeds(3)}
        for value in SOUP:
            with one_sentence((pipe, name, named(value))):
                pipe(**{**usual, name: value})


@pytest.mark.parametrize(
    ("function", "name"),
    [
        *(("estimate", name) for name in ("height", "width", "batch", "method", "text_length")),
        *(("schedule", name) for name in ("height", "width", "aspect_ratio", "pixel_budget")),
        ("encode", "images"),
        ("decode", "features"),
        ("encode_prompt", "prompts"),
        ("to", "device"),
        ("to", "dtype"),
    ],
)
def test_other_functions_of_a_pipeline(pipes, function: str, name: str) -> None:
    for pipe in pipes if function != "to" else (tiny_var(),):
        for value in SOUP:
            with one_sentence((function, name, named(value))):
                getattr(pipe, function)(**{name: value})


def test_loading(monkeypatch) -> None:
    import inspect

    def found(files):
        raise NextscaleError("all arguments are fine")

    monkeypatch.setattr("nextscale.checkpoints.pretrained.read", found)
    for name in inspect.signature(Pipeline.from_pretrained).parameters:
        for value in SOUP:
            with one_sentence((name, named(value))):
                Pipeline.from_pretrained(**{"local_files_only": True, "progress_bar": False, name: value})


def test_traces(pipes, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = pipes[0](1, callback_on_scale_end=lambda end: False, output_type="latent").trace
    for value in SOUP:
        with one_sentence(("save", named(value))):
            trace.save(value)
        with one_sentence(("share", named(value))):
            trace.share(value)
        for name in ("image", "scale", "layer", "group", "row"):
            with one_sentence(("kept", name, named(value))):
                trace.kept(**{"image": 0, "scale": 1, "layer": 1, name: value})


@pytest.mark.parametrize("cls", [*METHODS.values(), Compose], ids=lambda cls: cls.name)
def test_fields_of_methods(cls: type[Method], pipes) -> None:
    """What a constructor takes, `start` and a JSON file take, too."""
    import json

    var = pipes[0]
    schedule = var.schedule()
    context = var.model.policy_context(1, schedule, var.model.sampling(len(schedule)))
    for field in dataclasses.fields(cls):
        for value in SOUP:
            with one_sentence((cls.name, field.name, named(value))):
                method = cls(**{field.name: value})
                json.dumps(method.to_dict())
                hash(method)
                method.start(context)
