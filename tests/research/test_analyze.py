"""The papers' figures for a model at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.methods import ENTROPIES
from support.pipelines import ask, embeds

from nextscale import NOVA, Pipeline
from nextscale.engine.entropy import token_entropy
from nextscale.errors import NextscaleError
from nextscale.methods import ToProVAR
from nextscale.methods.naming import parse_methods
from nextscale.methods.toprovar import ToProVARPolicy
from nextscale.research.analyze import activation_scale, global_layers, shares
from nextscale.research.analyze.band import Band, CategorizedPrompt, measure_band, read_prompts
from nextscale.research.analyze.data import load, store
from nextscale.research.analyze.figures import FIGURES, get_figures
from nextscale.research.analyze.study import Study, default_methods
from nextscale.research.analyze.style import quoted, split_rows
from nextscale.research.analyze.watch import Watcher, WatchingPolicy, watch
from nextscale.testing import tiny_infinity, tiny_var

METHODS = "nova:t_est=3,toprovar,sparsevar,truncate:1"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class MadeUpText:
    """A text encoder without a text model."""

    nbytes = 0

    def encode(self, prompts):
        return [embeds(3 + len(p) % 5, seed=len(p))[0] for p in prompts]

    def to(self, device) -> None: ...


@pytest.fixture(scope="module")
def text() -> Pipeline:
    pipe = tiny_infinity()
    pipe.text_encoder = MadeUpText()
    return pipe


@pytest.fixture(scope="module")
def var() -> Pipeline:
    return tiny_var()


def study_of(pipe: Pipeline, prompt: str | int, asked: list[CategorizedPrompt], size: dict[str, str]) -> Study:
    return Study(pipe, prompt, 139, asked, 1, parse_methods(METHODS), size)


@pytest.fixture(scope="module")
def studies(text: Pipeline, var: Pipeline) -> dict[str, Study]:
    several = [
        CategorizedPrompt("a fox", "animals"),
        CategorizedPrompt("a dog", "animals"),
        CategorizedPrompt("bread", "food"),
    ]
    return {
        "text": study_of(text, "a $1 fox & <two> $2 dogs", several, {"pixel_budget": "0.06M", "aspect_ratio": 1.5}),
        "label": study_of(var, 4, [], {}),
    }


def test_watching_changes_nothing(any_pipe: Pipeline) -> None:
    plain, watched = (ask(any_pipe, 1, method=method, output_type="latent") for method in (None, Watcher()))
    assert torch.equal(plain.images, watched.images)
    policy = watched.trace.policy
    assert isinstance(policy, WatchingPolicy)
    assert all(len(layers) == any_pipe.backbone.depth for layers in policy.logit_lens + policy.moved)
    assert policy.attention is not None
    assert policy.attention.shape[0] == any_pipe.backbone.depth


def test_what_is_watched_is_what_methods_see(var: Pipeline) -> None:
    ends = []
    var(4, seed=139, callback_on_scale_end=ends.append)
    nova = NOVA(t_est=2, probe="lens", alpha=10)
    traced = var(4, seed=139, method=nova).trace.to_dict()["images"][0]["scales"]
    seen = watch(var, 4, 139)
    assert len(seen.thumbnails) == len(ends) == 8
    for t, end in enumerate(ends):
        assert seen.conditional[t].ravel() == pytest.approx(token_entropy(end.raw_logits[:1])[0].numpy(), abs=1e-5)
        assert seen.guided[t].ravel() == pytest.approx(token_entropy(end.logits)[0].numpy(), abs=1e-5)
    assert traced[3]["ratio"] > 0  # the first scale that NOVA reduces: all before it is the plain run
    assert seen.logit_lens[3][0].mean() == pytest.approx(traced[3]["layers"][0]["entropy"], rel=1e-5)
    # The state moves from the embedding to the last block by what the blocks change.
    assert np.stack(seen.moved[-1]).min() > 0


def test_singular_values_are_those_of_toprovar(var: Pipeline) -> None:
    policy = var(4, seed=139, method=ToProVAR(tau=1.0)).trace.policy
    assert isinstance(policy, ToProVARPolicy)
    data = global_layers.measure(watch(var, 4, 139), ToProVAR())
    assert data["scale"] == policy.landmark + 1
    assert data["ratios"] == pytest.approx(policy.dominance[0].tolist(), rel=1e-3)


def test_a_band_is_its_single_runs(text: Pipeline) -> None:
    asked = [CategorizedPrompt(p) for p in ("a fox", "a dog", "bread", "two cups", "a red tower")]
    size = {"pixel_budget": "0.06M"}
    band = measure_band(text, asked, 139, **size)
    alone = watch(text, "a red tower", 143, **size)
    assert band.conditional.shape == (5, 7)
    assert band.conditional[4] == pytest.approx([m.mean() for m in alone.conditional], rel=1e-4)
    assert band.guided[4] == pytest.approx([m.mean() for m in alone.guided], rel=1e-4)


def test_activation_is_that_of_nova(var: Pipeline) -> None:
    method = NOVA(t_est=3, probe="lens")
    band = measure_band(var, [CategorizedPrompt(i) for i in range(4)], 0)
    out = var([0, 1, 2, 3], seed=[0, 1, 2, 3], method=method)
    assert out.trace.policy is not None
    really = [out.trace.policy.explain(i).activation.scale for i in range(4)]
    assert activation_scale.measure(band, method)["first_reduced"] == really


@pytest.mark.parametrize("kind", ["text", "label"])
def test_every_figure_and_its_data(kind: str, studies: dict[str, Study], tmp_path: Path) -> None:
    for figure in FIGURES.values():
        path = store(figure.measure(studies[kind]), tmp_path, figure.name)
        assert path.stat().st_size < 500_000
        if kind == "text" or figure.name in ("entropy", "activation", "kept", "restored", "exit_measures", "shares"):
            figure.draw(load(path), tmp_path / f"{figure.name}.png")  # from the data alone
            assert Image.open(tmp_path / f"{figure.name}.png").size[0] == 1200


def test_shares_add_up_to_the_budget(var: Pipeline) -> None:
    adaptive = f"taper:0.5;entropies={json.dumps(ENTROPIES)}"
    asked = [CategorizedPrompt(label) for label in (1, 2, 3)]
    data = shares.measure(Study(var, 4, 139, asked, 1, parse_methods(f"taper:0.5,{adaptive}+truncate:1,nova:t_est=3")))
    assert list(data["methods"]) == ["taper:0.5", f"{adaptive}+truncate:1"]
    assert sum(data["plain"]) == pytest.approx(1, abs=1e-5)
    fixed, free = data["methods"].values()
    assert sum(fixed["flops"]) == pytest.approx(0.5, rel=0.05)
    assert fixed["kept"] == fixed["least"] == fixed["most"] == pytest.approx(fixed["planned"], abs=0.02)
    assert all(a <= b <= c for a, b, c in zip(free["least"], free["kept"], free["most"], strict=True))
    assert free["kept"][-1] == free["flops"][-1] == 0
    assert all(flops <= plain for flops, plain in zip(fixed["flops"], data["plain"], strict=True))


def test_every_category_and_none_that_is_reduced(tmp_path: Path) -> None:
    flat = np.tile(np.linspace(1, 2, 9), (3, 1))
    band = Band(
        "m",
        [CategorizedPrompt("a", "x"), CategorizedPrompt("b", "y"), CategorizedPrompt("c", "y")],
        [0, 1, 2],
        flat,
        flat,
    )
    data = activation_scale.measure(band, NOVA())
    assert data["first_reduced"] == [None] * 3
    activation_scale.draw(data, tmp_path / "a.png")


def test_data_comes_back(tmp_path: Path) -> None:
    data = {"a": [1, None, "ü"], "m": np.eye(2), "l": [np.zeros((i, i)) for i in range(1, 13)]}
    back = load(store(data, tmp_path, "x"))
    assert back["a"] == data["a"]
    assert np.array_equal(back["m"], np.eye(2))
    assert [x.shape for x in back["l"]] == [(i, i) for i in range(1, 13)]
    assert load(store({"a": 1}, tmp_path, "y")) == {"a": 1}


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("animals\ta fox\n\n two dogs \n")
    assert read_prompts(path, labels=False) == [
        CategorizedPrompt("a fox", "animals"),
        CategorizedPrompt("two dogs", "all prompts"),
    ]
    path.write_text("birds\t4\n7\n")
    assert read_prompts(path, labels=True) == [CategorizedPrompt(4, "birds"), CategorizedPrompt(7)]
    for content, labels, sentence in (
        ("", False, "holds no prompt"),
        ("birds\t\n", False, "line 1: write a prompt"),
        ("a fox\n", True, "takes a class number, not 'a fox'"),
    ):
        path.write_text(content)
        with pytest.raises(NextscaleError, match=sentence):
            read_prompts(path, labels)
    with pytest.raises(NextscaleError, match="cannot be read"):
        read_prompts(tmp_path, False)


def test_small_things(var: Pipeline) -> None:
    assert [len(r) for r in split_rows(range(13), 7)] == [7, 6]
    assert [len(r) for r in split_rows(range(3), 4)] == [3]
    assert quoted("x" * 80, 10) == "“xxxxxxxxx…”"
    assert quoted(4) == "class 4"
    assert list(default_methods(var)) == ["nova", "toprovar", "sparsevar", "fastvar", "truncate:1"]
    assert [f.name for f in get_figures("blocks, entropy")] == ["blocks", "entropy"]
    by_name = ["saliency", "layer_roles", "scale_depth", "exit_measures", "exit_blocks", "restored", "shares"]
    assert [f.name for f in get_figures(None)] == [name for name in FIGURES if name not in by_name]
    assert [f.name for f in get_figures("blocks,all")] == ["blocks", *(name for name in FIGURES if name != "blocks")]
