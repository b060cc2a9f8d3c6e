"""One matrix: every method on every kind of model. A new method joins by a line in METHODS."""

from __future__ import annotations

import copy
import importlib
import json
from importlib.resources import files as package_files
from pathlib import Path

import pytest
import torch
from support.methods import METHODS
from support.pipelines import ask, embeds, same_tokens

from nextscale import (
    NOVA,
    Compose,
    DropGuidance,
    FastVAR,
    RandomSelection,
    SparseVAR,
    ToProVAR,
    Truncate,
)
from nextscale.engine import rng
from nextscale.errors import NextscaleError
from nextscale.methods import METHODS as REGISTERED
from nextscale.methods import from_dict
from nextscale.methods.nova.policy import NOVAPolicy
from nextscale.runtime import eager
from nextscale.testing import tiny_infinity

try:
    import jsonschema
except ImportError:  # the GPU machine has none; `make test` installs it
    jsonschema = None

# A decision like those that SkipVAR fits, for images of tiny models.
# Configurations that reduce nothing.
NOTHING = {
    "nova": NOVA(t_est=2, scale_linkage=False, scale_table="1:0"),
    "nova, attention": NOVA(t_est=2, scale_linkage=False, scale_table="1:0", metric="attention"),
    "toprovar": ToProVAR(tau=1.0),
    "sparsevar": SparseVAR(tau=0.0),
    "fastvar": FastVAR(scale_table="1:0"),
    "truncate": Truncate(0),
    "random selection": RandomSelection(Truncate(0)),
    "composed": Truncate(0) + NOVA(t_est=2, scale_linkage=False, scale_table="1:0"),
}
SHAPES = {"var": {}, "infinity": {}, "infinity wide": {"aspect_ratio": 0.571}, "patchified": {}, "hart": {}}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest):
    return METHODS[request.param]


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest):
    pipe = request.getfixturevalue(request.param.split()[0])
    return pipe, SHAPES[request.param]


def test_matrix_names_every_method() -> None:
    used = {part.name for m in METHODS.values() for part in (m.parts if isinstance(m, Compose) else (m,))}
    assert used == set(REGISTERED)


@pytest.mark.parametrize("name", NOTHING)
def test_1_reducing_nothing_is_bit_identical(model, name: str) -> None:
    pipe, size = model
    plain = ask(pipe, 2, output_type="latent", **size)
    nothing = ask(pipe, 2, output_type="latent", method=NOTHING[name], **size)
    assert torch.equal(plain.images, nothing.images)


def test_2_a_b_a(model, method) -> None:
    pipe, size = model
    plain, first = ask(pipe, 1, **size), ask(pipe, 2, method=method, **size)
    ask(pipe, 1, first=3, method=NOVA(t_est=3), **size)
    assert same_tokens(first, ask(pipe, 2, method=method, **size))
    assert same_tokens(plain, ask(pipe, 1, **size))


def test_3_a_batch_equals_single_runs(model, method) -> None:
    pipe, size = model
    batch = ask(pipe, 3, method=method, **size)
    traced = batch.trace.to_dict()["images"]
    for i in range(3):
        mine = [b[i : i + 1] for b in batch.tokens]
        single = ask(pipe, 1, first=i, method=method, **size)
        flipped = next((n for b, s in zip(mine, single.tokens, strict=True) if (n := int((b != s).sum()))), 0)
        if flipped:  # rounding decided, on this processor; rows or caches that are mixed up change hundreds
            assert flipped <= 2
            assert_equal_but_for_ties(pipe, i, batch.tokens, method=method, **size)
            continue
        alone = single.trace.to_dict()["images"][0]
        assert computed(alone) == computed(traced[i])
        assert alone["stopped_after"] == traced[i]["stopped_after"]
        assert alone["activation"]["star"] == traced[i]["activation"]["star"]


def assert_equal_but_for_ties(pipe, image: int, tokens: list[torch.Tensor], **options) -> None:
    """With the tokens given, logits agree until two cells of equal score change places in a selection."""
    ends: list[list] = [[], []]
    scores: dict[tuple[int, int], torch.Tensor] = {}  # NOVA's, by scale and layer
    rank = NOVAPolicy._score

    def noted(self, layer, entropy, ctx):
        found = scores[ctx.scale.index + 1, layer + 1] = rank(self, layer, entropy, ctx)
        return found

    batch = ask(pipe, 3, force_tokens=tokens, callback_on_scale_end=ends[0].append, **options)
    mine = [t[image : image + 1] for t in tokens]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NOVAPolicy, "_score", noted)
        single = ask(pipe, 1, first=image, force_tokens=mine, callback_on_scale_end=ends[1].append, **options)
    for one, alone in zip((e for e in ends[0] if image in e.images), ends[1], strict=True):
        scale = one.scale.index + 1
        for layer in range(1, pipe.backbone.depth + 1):
            swapped = batch.trace.kept(image, scale, layer) != single.trace.kept(0, scale, layer)
            if swapped.any():
                a, b = scores[scale, layer][0][torch.from_numpy(swapped).flatten()].tolist()  # two, and no more
                assert a == pytest.approx(b, rel=1e-6)
                return
        torch.testing.assert_close(one.logits[one.images.index(image)], alone.logits[0], rtol=1e-4, atol=1e-4)


def computed(traced: dict) -> list[tuple[int, list[int]]]:
    """Rows of every scale, and tokens of its layers."""
    return [(e["rows"], [layer["kept"] for layer in e["layers"]]) for e in traced["scales"]]


def test_4_the_same_random_numbers_with_and_without(model, method, monkeypatch) -> None:
    pipe, size = model
    drawn: list[dict] = []

    class Noting(rng.PerImageNoise):
        def _exponential(self, like, scale, images, stream):
            noise = super()._exponential(like, scale, images, stream)
            drawn[-1].update({(scale, image): noise[row] for row, image in enumerate(images)})
            return noise

    monkeypatch.setattr(rng, "PerImageNoise", Noting)
    for m in (None, method):
        drawn.append({})
        ask(pipe, 2, method=m, **size)
    plain, reduced = drawn
    assert reduced
    assert all(torch.equal(plain[key], noise) for key, noise in reduced.items())


@pytest.mark.parametrize("name", ["var", "infinity"])
def test_images_of_the_matrix_activate_at_different_scales(request, name: str) -> None:
    traced = ask(request.getfixturevalue(name), 3, method=METHODS["nova"]).trace.to_dict()["images"]
    assert len({image["activation"]["star"] for image in traced}) > 1


def test_images_of_the_matrix_stop_at_different_scales(model) -> None:
    pipe, size = model
    traced = ask(pipe, 3, method=METHODS["skipvar"], **size).trace.to_dict()["images"]
    assert len({tuple(e["rows"] for e in image["scales"]) for image in traced}) > 1


def test_5_the_trace_adds_up(model, method, monkeypatch) -> None:
    pipe, size = model
    runs, lengths = [], {}
    original = eager.GenerationState

    def load(*args):
        runs.append(original(*args))
        return runs[-1]

    def look(end) -> None:
        for row, image in enumerate(runs[0].rows.all):
            conditional = row < runs[0].rows.images
            lengths[image, conditional] = [int(cache.lengths[row]) for cache in runs[0].kv]

    monkeypatch.setattr(eager, "GenerationState", load)
    out = ask(pipe, 2, method=method, callback_on_scale_end=look, **size)
    data = out.trace.to_dict()
    schema = json.loads(package_files("nextscale").joinpath("trace.schema.json").read_text())
    if jsonschema is not None:
        jsonschema.validate(data, schema)
    assert data["method"] == method.to_dict()
    for image in data["images"]:
        per_scale = [sum(layer["kept"] for layer in e["layers"]) for e in image["scales"]]
        assert image["tokens_computed"] == sum(per_scale)
        assert image["row_tokens_computed"] == sum(
            n * e["rows"] for n, e in zip(per_scale, image["scales"], strict=True)
        )
        kept = [sum(e["layers"][j]["kept"] for e in image["scales"] if e["ran"]) for j in range(pipe.backbone.depth)]
        assert sum(e["context"] for e in image["scales"]) == pipe.backbone.context
        cached = [pipe.backbone.context + k for k in kept]
        assert lengths[image["index"], True] == cached, "KV entries = context + kept tokens"
        reduced = image["row_tokens_computed"] < image["row_tokens_full"]
        assert not reduced or image["activation"]["scale"] is not None
        assert (image["flops"] < image["flops_full"]) == reduced
        for e in image["scales"]:
            for layer in e["layers"]:
                cells = out.trace.kept(image["index"], e["scale"], layer["layer"])
                assert cells.shape == tuple(e["grid"])
                assert cells.sum() == layer["kept"]


@pytest.fixture(scope="module")
def half():
    return tiny_infinity().to(dtype="bfloat16")


def test_6_the_stream_stays_float32_in_half_precision(half, method) -> None:
    """What fills the holes is stored as exactly as layers compute, and must not make the others as coarse."""
    kinds = set()

    def look(end) -> None:
        kinds.add((end.hidden.dtype, end.raw_logits.dtype, bool(torch.isfinite(end.raw_logits).all())))

    ask(half, 2, method=method, callback_on_scale_end=look, output_type="latent")
    assert kinds == {(torch.float32, torch.float32, True)}


def test_methods_and_json(method) -> None:
    stored = json.loads(json.dumps(method.to_dict()))
    assert from_dict(stored) == method
    assert eval(repr(method), {m.__name__: m for m in (*REGISTERED.values(), Compose)}) == method


def test_toprovar_leaves_out_a_scale_in_which_nothing_is_kept(any_pipe) -> None:
    """As if it had not been there, whatever uncomputed cells do."""
    for uncomputed in ("sample", "nothing"):
        out = ask(any_pipe, 2, method=ToProVAR(a_min=1.0, a_max=1.0, scale_stage=False, uncomputed=uncomputed))
        scales = out.trace.image(0)["scales"]
        empty = [e["scale"] for e in scales if not any(layer["kept"] for layer in e["layers"])]
        assert empty == list(range(out.trace.image(0)["activation"]["scale"], len(scales) + 1))
        assert all((out.tokens[t - 1] == -1).all() for t in empty)
        short = ask(any_pipe, 2, method=Truncate(len(empty)), output_type="pt")
        again = ask(any_pipe, 2, force_tokens=out.tokens, output_type="pt")
        assert torch.equal(again.images, short.images)


def test_kept_maps_in_a_file(infinity, tmp_path) -> None:
    import numpy as np

    out = ask(infinity, 1, method=NOVA(t_est=2))
    out.trace.save(tmp_path / "maps.npz")
    maps = np.load(tmp_path / "maps.npz")
    assert len(maps.files) == 7 * 4 * 3 * 2  # scales, layers, parts, rows
    assert np.array_equal(maps["image0/scale7/layer2/cross/row1"], out.trace.kept(0, 7, 2, "cross", 1))
    with pytest.raises(NextscaleError, match=r"scale must be a whole number, from 1 to 7, not 8"):
        out.trace.kept(0, 8, 1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: NOVA(alpha=-1), r"nova: alpha must lie in \[0, 10\], not -1"),
        (lambda: NOVA(tau=0), r"tau must lie in \(0, 100\]"),
        (lambda: NOVA(lam=float("nan")), "lam must be a finite number"),
        (lambda: NOVA(metric="magic"), "metric must be one of entropy, attention, mse, random, not 'magic'"),
        (lambda: NOVA(scale_table="mine"), "unknown scale table 'mine'; allowed: fastvar"),
        (lambda: Truncate(-1), r"k must lie in \[0, 1000\]"),
        (lambda: Compose(()), "at least one method"),
        (lambda: from_dict({"name": "magic", "fields": {}}), "unknown method 'magic'; allowed: nova"),
        (lambda: from_dict({"name": "nova", "fields": {"beta": 1}}), "nova has no field 'beta'; allowed: t_est"),
        (lambda: from_dict({"name": "nova", "schema": 7}), "schema 7; this version reads 1"),
        (lambda: from_dict({"fields": {}}), "it needs 'name' and 'fields'"),
        (
            lambda: NOVA.preset("quick"),
            "nova has no preset 'quick'; allowed: balanced, faithful, fast, literal, paper, or a file",
        ),
    ],
)
def test_bad_methods(make, match: str) -> None:
    with pytest.raises(NextscaleError, match=match):
        make()


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        (NOVA(t_est=6), {}, "t_est = 6 needs a schedule of at least 8 scales, this one has 7"),
        (Truncate(7), {}, "k = 7 leaves nothing of a schedule of 7 scales"),
        (DropGuidance(8), {}, "from_scale = 8 lies beyond the last scale, 7"),
        (DropGuidance(4), {"guidance_scale": 1.0}, "needs a guided run"),
        (NOVA(t_est=2) + NOVA(t_est=3), {}, "nova and nova both select tokens"),
        (RandomSelection(NOVA(t_est=6)), {}, "needs a schedule of at least 8"),
    ],
)
def test_methods_that_do_not_fit_the_call(infinity, method, options, match: str) -> None:
    with pytest.raises(NextscaleError, match=match):
        ask(infinity, method=method, **options)


def test_presets(tmp_path) -> None:
    assert NOVA.preset("paper") == NOVA()
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"schema": 1, "name": "nova", "fields": {"alpha": 0.4}}))
    assert NOVA.preset(str(mine)) == NOVA(alpha=0.4)
    with pytest.raises(NextscaleError, match="is a preset of nova, not of truncate"):
        Truncate.preset(str(mine))
    mine.write_text("{")
    with pytest.raises(NextscaleError, match="not a stored method"):
        NOVA.preset(str(mine))


def test_the_benchmark_of_all_methods_measures(infinity, monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    measure = importlib.import_module("methods_cpu").measure
    pipe = copy.copy(infinity)
    asked = {"prompt_embeds": embeds(3), "seed": 0, "pixel_budget": "0.06M", "output_type": "latent"}
    plain, nova = (measure(pipe, asked, method) for method in (None, NOVA(t_est=2, alpha=10)))
    assert plain["tokens"] == 1 > nova["tokens"] > 0
    assert plain["kv"] > nova["kv"] > 0
    assert plain["decisions"] == 0 < nova["decisions"]
