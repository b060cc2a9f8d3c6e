"""Which cells every method keeps: recorded runs of tiny models against oracles in plain numpy."""

from __future__ import annotations

import ast
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.oracles.fastvar import Fast
from support.oracles.maths import highest, uniform
from support.oracles.nova import Nova, restored
from support.oracles.skipvar import Skip
from support.oracles.sparsevar import Sparse
from support.oracles.toprovar import Topro
from support.pipelines import DATA
from support.recording import kept, record

from nextscale import NOVA, FastVAR, RandomSelection, SkipVAR, SparseVAR, ToProVAR, Truncate

CLEAR = 1e-4  # every decision of these runs is clearer than rounding
RAMP = tuple(1 + 3 * k / 7 for k in range(8))  # VAR's guidance of strength 3, scale by scale


def test_the_oracles_know_nothing_of_the_package() -> None:
    for path in (Path(__file__).parents[1] / "support/oracles").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not any(n.split(".")[0] in ("nextscale", "torch") for n in names), path.name


def check_cells(out, run, image: int, t: int, layer: int, cells: np.ndarray) -> None:
    """Both rows of a guided pair keep exactly these."""
    for row in range(len(run.scales[t].raw) // run.images):
        assert (kept(out, image, t, layer, row=row) == cells).all(), (image, t, layer, row)


def check_holes(run, t: int, layer: int, cells: np.ndarray, image: int, cache: str, mode: str) -> None:
    key = next(k for k in run.scales[t].inputs if k[0] == layer)
    restore = restored(run, t, key, cache, mode)
    for row in range(image, len(restore), run.images):
        off = np.abs(run.scales[t].outputs[key][row] - restore[row]).max(-1)
        assert (off[~cells] < 1e-4).all()
        assert (off[cells] > 1e-3).all(), "a computed cell is not what the cache would have said"


def literal(**fields) -> NOVA:
    """The literal reading of the paper: every layer ranks the cells by its own lens."""
    base = NOVA.preset("literal")
    return replace(base, **{"t_est": 2, "alpha": 0.4, "probe": "lens", **fields})


def check_nova(out, run, method: NOVA, settings: dict) -> None:
    """All that NOVA decided, image by image."""
    for image, traced in enumerate(out.trace.to_dict()["images"]):
        want = Nova(run, image, t_est=method.t_est, alpha=method.alpha, mode=method.restore_mode, **settings)
        assert want.margins.smallest > CLEAR
        assert want.star is not None
        assert traced["activation"]["star"] == want.star + 1
        assert traced["activation"]["eta"] == pytest.approx(want.eta, abs=1e-5)
        reduced = 0
        for t, entry in enumerate(traced["scales"]):
            assert entry["entropy"] == pytest.approx(want.mean[t], abs=1e-5)
            assert entry["ratio"] == pytest.approx(want.ratio[t], abs=1e-5)
            for layer, told in enumerate(entry["layers"]):
                cells = want.kept.get((t, layer), np.ones(run.scales[t].tokens, dtype=bool))
                check_cells(out, run, image, t, layer, cells)
                assert told["kept"] == cells.sum()
                if want.ratio[t]:
                    if method.layer_linkage or method.probe != "previous":  # nobody looks at layers otherwise
                        assert told["entropy"] == pytest.approx(want.layer_mean[t, layer], abs=1e-5)
                    assert told["ratio"] == pytest.approx(want.layer_ratio[t, layer], abs=1e-5)
                    check_holes(run, t, layer, cells, image, method.cache, method.restore_mode)
                    reduced += not cells.all()
        assert reduced >= 4


# Fields of the method, what they mean to the oracle, and seeds of clear decisions for each model.
NOVA_CASES = {
    "lens": ({}, {}, {"var": 139, "infinity": 139, "hart": 139}),
    "attention": ({"metric": "attention"}, {"metric": "attention"}, {"var": 139, "infinity": 146}),
    "mse": ({"metric": "mse"}, {"metric": "mse"}, {"var": 140, "infinity": 144, "hart": 139}),
    "random": ({"metric": "random"}, {"metric": "random"}, {"var": 139, "infinity": 139}),
    "previous": (
        {"probe": "previous", "layer_linkage": False},
        {"probe": "previous", "layer_linkage": False},
        {"var": 139, "infinity": 139, "hart": 139},
    ),
    "from layer 2": (
        {"probe_from_layer": 2, "restore_mode": "area"},
        {"first_layer": 1},
        {"var": 139, "infinity": 140, "hart": 139},
    ),
    "bits": ({"unit": "bit", "cache": "zero"}, {"unit": "bit"}, {"infinity": 139}),
    "guided": ({"entropy_of": "guided"}, {"guidance": (3.0,) * 7}, {"infinity": 139}),
    "guided ramp": ({"entropy_of": "guided"}, {"guidance": RAMP}, {"var": 139}),
    "bounded": (
        {"max_layer_keep": 0.3, "tau": 3.0, "lam": 0.4, "cache": "feature"},
        {"most_kept": 0.3, "tau": 3.0, "lam": 0.4},
        {"var": 139, "infinity": 139, "hart": 139},
    ),
    "table": (
        {"scale_linkage": False, "scale_table": "5/8:0.23 6/8:0.47 7/8:0.61 1:0.77", "restore_mode": "bicubic"},
        {"ratios": {4: 0.23, 5: 0.47, 6: 0.61, 7: 0.77}},
        {"var": 139, "hart": 139},
    ),
    "likely codes": ({"probe": "lens_topk", "restore_mode": "nearest"}, {"codes": 6}, {"var": 139, "hart": 139}),
}
WIDE = {"aspect_ratio": 0.571}
NOVA_RUNS = [(name, model) for name, case in NOVA_CASES.items() for model in case[2]]


@pytest.mark.parametrize(("name", "model"), NOVA_RUNS)
def test_nova(request, monkeypatch, name: str, model: str) -> None:
    monkeypatch.setattr("nextscale.methods.nova.policy.LENS_CODES", 6)  # fewer than the codes of a tiny model
    fields, settings, seeds = NOVA_CASES[name]
    method = literal(**fields)
    seed = seeds[model]
    out, run = record(request.getfixturevalue(model), method, seed=[seed, seed + 1], temperature=1.0)
    check_nova(out, run, method, settings)


@pytest.mark.parametrize(("model", "seed"), [("var", 139), ("infinity", 142), ("hart", 146)])
def test_nova_with_the_layer_means_of_the_scale_before(request, model: str, seed: int) -> None:
    method = literal(probe="previous")
    out, run = record(request.getfixturevalue(model), method, seed=[seed, seed + 1])
    check_nova(out, run, method, {"probe": "previous"})


# The default reading: cells are ranked once per scale. Fields and seeds as above.
SCALE_CASES = {
    "default": ({}, {}, {"var": 139, "infinity": 144, "hart": 139}),
    "lens": ({"probe": "lens"}, {"probe": "lens"}, {"var": 139, "infinity": 139, "hart": 139}),
    "all layers": ({"required": 1.0}, {"required": 1.0}, {"var": 139, "infinity": 141}),
    "one selection": ({"layer_linkage": False}, {"layer_linkage": False}, {"var": 139, "infinity": 139}),
    "sampled": ({"uncomputed": "sample"}, {}, {"infinity": 139}),
    "attention": ({"metric": "attention"}, {"metric": "attention"}, {"var": 140, "infinity": 141}),
    "mse": ({"metric": "mse"}, {"metric": "mse"}, {"var": 140, "infinity": 139}),
    "random": ({"metric": "random"}, {"metric": "random"}, {"infinity": 140}),
}
SCALE_RUNS = [(name, model) for name, case in SCALE_CASES.items() for model in case[2]]


@pytest.mark.parametrize(("name", "model"), SCALE_RUNS)
def test_nova_ranks_once_per_scale(request, name: str, model: str) -> None:
    fields, settings, seeds = SCALE_CASES[name]
    method = NOVA(**{"t_est": 2, "alpha": 0.4, "tau": 3.0, **fields})
    settings = {
        "tau": 3.0,
        "probe": "previous",
        "by_scale": True,
        "rounds": True,
        "required": 0.5,
        "holds": True,
        **settings,
    }
    out, run = record(request.getfixturevalue(model), method, seed=[seeds[model], seeds[model] + 1])
    check_nova(out, run, method, settings)
    bits = model == "infinity" and method.uncomputed == "auto"
    for image in range(2):
        want = Nova(run, image, t_est=2, alpha=0.4, **settings)
        partly = 0
        for t, computed in want.computed.items():
            partly += 0 < computed.sum() < computed.size
            weight = run.scales[t].weight
            masks = [want.kept[t, layer] for layer in range(run.depth)]
            if bits:
                assert np.array_equal(weight[image], computed)
            else:
                assert weight is None or (weight[image] == np.any(masks)).all(), "only an empty scale adds nothing"
            sizes = sorted(masks, key=np.sum)
            assert all((a <= b).all() for a, b in itertools.pairwise(sizes)), "sets are nested"
        assert partly


@pytest.mark.parametrize(
    "fields", [{}, {"metric": "attention"}, {"probe": "previous", "layer_linkage": False}], ids=str
)
def test_nova_on_wide_grids(infinity, fields: dict) -> None:
    method = literal(**fields)
    out, run = record(infinity, method, seed=[140, 141], **WIDE)
    assert all(h != w for h, w in (s.grid for s in run.scales[3:]))
    check_nova(out, run, method, fields)


# The representative scale is 6/13 of the schedule: the third of 7, the fourth of 8.
TOPRO_CASES = {
    "plain": ({"tau": 0.45, "a_max": 0.9}, {"var": 145, "infinity": 141, "hart": 140}),
    "late": ({"tau": 0.55, "beta": 0.5, "a_min": 0.1}, {"var": 140, "infinity": 145}),
    "previous layer": (
        {"tau": 0.45, "entropy_from": "previous_layer", "restore_mode": "bilinear"},
        {"var": 148, "infinity": 150},
    ),
    "scales only": ({"layer_stage": False, "token_stage": False, "scale_stage": False}, {"var": 139, "infinity": 139}),
    "layers only": ({"token_stage": False, "center": False, "scale_stage": False, "beta": 0.01}, {"var": 139}),
}
TOPRO_RUNS = [(name, model) for name, case in TOPRO_CASES.items() for model in case[1]]


@pytest.mark.parametrize(("name", "model"), TOPRO_RUNS)
def test_toprovar(request, name: str, model: str) -> None:
    fields, seeds = TOPRO_CASES[name]
    method, seed = ToProVAR(**{"restore_mode": "nearest", **fields}), seeds[model]
    out, run = record(request.getfixturevalue(model), method, seed=[seed, seed + 1])
    check_toprovar(out, run, method)


def test_toprovar_on_wide_grids(infinity) -> None:
    method = ToProVAR(tau=0.45, a_max=0.9, restore_mode="bilinear")
    out, run = record(infinity, method, seed=[151, 152], **WIDE)
    check_toprovar(out, run, method)


def topro(run, image: int, m: ToProVAR) -> Topro:
    return Topro(
        run,
        image,
        representative=2 if len(run.scales) == 7 else 3,
        tau=m.tau,
        beta=m.beta,
        a_min=m.a_min,
        a_max=m.a_max,
        center=m.center,
        previous_layer=m.entropy_from == "previous_layer",
        starts=m.scale_stage,
        by_layer=m.layer_stage,
        by_token=m.token_stage,
        mode=m.restore_mode,
    )


def check_toprovar(out, run, m: ToProVAR) -> None:
    for image, traced in enumerate(out.trace.to_dict()["images"]):
        want = topro(run, image, m)
        assert want.margins.smallest > CLEAR
        assert want.first is not None
        assert traced["activation"]["scale"] == want.first + 1
        for t, entry in enumerate(traced["scales"]):
            for layer, told in enumerate(entry["layers"]):
                cells = want.kept.get((t, layer), np.ones(run.scales[t].tokens, dtype=bool))
                assert told["kept"] == cells.sum()
                check_cells(out, run, image, t, layer, cells)
                if t >= want.first:
                    check_holes(run, t, layer, cells, image, "residual", m.restore_mode)
        assert sum(not mask.all() for mask in want.kept.values()) >= 4


@pytest.mark.parametrize(
    ("model", "seed", "tau", "block"),
    [
        ("var", 139, 0.95, 0.0),
        ("var", 140, 0.9, 1.0),
        ("infinity", 140, 0.9, 0.0),
        ("infinity", 144, 0.95, 1.0),
        ("hart", 142, 0.95, 0.0),
        ("hart", 141, 0.97, 1.0),
    ],
)
def test_sparsevar(request, model: str, seed: int, tau: float, block: float) -> None:
    """Three sparse scales; `block` 1 is the last one, however blocks are counted."""
    m = SparseVAR(start_scale=0.7, tau=tau, block=block, anchor=3, similarity=0.95)
    out, run = record(request.getfixturevalue(model), m, seed=[seed, seed + 1])
    check_sparsevar(out, run, m)


def test_sparsevar_on_wide_grids(infinity) -> None:
    m = SparseVAR(start_scale=0.7, tau=0.95, block=1.0, anchor=3, similarity=0.95)
    out, run = record(infinity, m, seed=[144, 145], **WIDE)
    check_sparsevar(out, run, m)


def check_sparsevar(out, run, m: SparseVAR) -> None:
    index = 3 if m.block else 0
    first = 4 if len(run.scales) == 7 else 5
    for image, traced in enumerate(out.trace.to_dict()["images"]):
        want = Sparse(run, image, first=first, block=index, tau=m.tau, anchor=m.anchor, similarity=m.similarity)
        assert want.margins.smallest > 1e-5  # anchors that are closer than this count as equally similar
        assert traced["activation"]["scale"] == first + 1
        for t, scale in enumerate(run.scales):
            cells = want.kept.get(t, np.ones(scale.tokens, dtype=bool))
            for layer in range(run.depth):
                check_cells(out, run, image, t, layer, cells)
            if t >= first:
                check_copies(scale, image, run.images, want.source[t])
        assert not all(mask.all() for mask in want.kept.values())


def check_copies(scale, image: int, images: int, source: np.ndarray) -> None:
    own = np.where(source < 0, np.arange(len(source)), source)
    last = scale.outputs[max(scale.outputs)]
    for row in range(image, len(last), images):
        assert np.array_equal(scale.completed[row], last[row][own])
    assert np.array_equal(scale.weight[image], source >= 0)


def test_fastvar(infinity) -> None:
    m = FastVAR(scale_table="5/7:0.4 6/7:0.55 1:0.7", first_layer=0.25, last_layer=0.75)
    out, run = record(infinity, m, seed=[149, 150])
    want = Fast(run, ratios={4: 0.4, 5: 0.55, 6: 0.7}, layers=range(1, 3))
    assert want.margins.smallest > CLEAR
    assert len(want.kept) == 3 * 2 * 3  # scales, layers, sub-layers
    for t, scale in enumerate(run.scales):
        for layer, group in scale.inputs:
            masks = want.kept.get((t, layer, group))
            for r in range(4):
                cells = kept(out, r % 2, t, layer, *group, row=r // 2)
                assert (cells == (True if masks is None else masks[r])).all()
                if masks is not None:
                    off = np.abs(scale.outputs[layer, group][r] - want.filled[t, layer, group][r]).max(-1)
                    assert (off[~cells] < 1e-5).all()
                    assert (off[cells] > 1e-3).all()


DECISION = DATA / "skipvar_decision.json"


@pytest.mark.parametrize(
    ("model", "preview"), [("var", (3, 3)), ("infinity", (4, 4)), ("patchified", (8, 8)), ("hart", (3, 3))]
)
def test_skipvar(request, model: str, preview: tuple[int, int]) -> None:
    out, run = record(request.getfixturevalue(model), SkipVAR(str(DECISION), at=0.5), images=3)
    decision, answers = json.loads(DECISION.read_text()), set()
    for image, traced in enumerate(out.trace.to_dict()["images"]):
        want = Skip(run, image, decides=3, preview=preview, decision=decision)
        assert want.margins.smallest > CLEAR
        rows = [0 if t >= want.stop else 1 if t >= want.unguided else 2 for t in range(len(run.scales))]
        assert [e["rows"] for e in traced["scales"]] == rows
        answers.add(tuple(rows))
    assert len(answers) > 1, "these images decide differently"


def test_random_selection_keeps_as_many_and_any(infinity) -> None:
    like = literal()
    out, run = record(infinity, RandomSelection(like, seed=5), seed=[139, 140])
    found = {}
    for image, traced in enumerate(out.trace.to_dict()["images"]):
        for t, entry in enumerate(traced["scales"]):
            for layer, told in enumerate(entry["layers"]):
                if not entry["ratio"]:
                    assert told["kept"] == run.scales[t].tokens
                    continue
                n = run.scales[t].tokens
                assert told["kept"] == max(n - int(np.floor(told["ratio"] * n)), 1)
                key = f"5/{t}/{layer}/{('self', 'cross', 'ffn')}".encode()
                order = uniform(n, int.from_bytes(key, "little") % (2**31 - 1))
                cells, _ = highest(order, told["kept"])
                check_cells(out, run, image, t, layer, cells)
                found[t, layer] = tuple(np.argsort(order))
    assert len(set(found.values())) == len(found) > 4, "every layer draws for itself"


def test_guidance_and_temperature(var) -> None:
    _, run = record(var, Truncate(0), temperature=0.7)
    for weight, scale in zip(RAMP, run.scales, strict=True):
        conditional, unconditional = np.split(scale.raw, 2) if len(scale.raw) == 4 else (scale.raw, scale.raw)
        expected = (weight * conditional + (1 - weight) * unconditional) / 0.7
        assert np.abs(scale.guided - expected).max() < 1e-4
