"""What single experiments of the figures do: pruning, excluding, restoring, counting; against plain formulas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.pipelines import embeds

from nextscale import Pipeline
from nextscale.engine.callback import ScaleEnd
from nextscale.engine.trace import Costs
from nextscale.errors import NextscaleError
from nextscale.methods import SparseVAR, ToProVAR
from nextscale.research.analyze import (
    exit_blocks,
    flops_over_size,
    layer_roles,
    memory_per_scale,
    quality_curves,
    restored_codes,
    scale_depth,
    token_spectra,
)
from nextscale.research.analyze.band import CategorizedPrompt, measure_band, with_seeds
from nextscale.research.analyze.exclusion import Exclude, ExcludePolicy
from nextscale.research.analyze.pruning import Prune
from nextscale.research.analyze.restoring import RestoreScale
from nextscale.research.analyze.study import Study
from nextscale.research.analyze.watch import watch
from nextscale.research.evaluate.ssim import ssim
from nextscale.research.evaluate.sweep import read_sweep
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class MadeUpText:
    nbytes = 0

    def encode(self, prompts):
        return [embeds(3 + len(p) % 5, seed=len(p))[0] for p in prompts]

    def to(self, device) -> None: ...


def with_text(pipe: Pipeline) -> Pipeline:
    pipe.text_encoder = MadeUpText()
    return pipe


@pytest.fixture(scope="module")
def text() -> Pipeline:
    return with_text(tiny_infinity())


@pytest.fixture(scope="module")
def label() -> Pipeline:
    return tiny_var()


@pytest.fixture(scope="module")
def study(text: Pipeline) -> Study:
    """Seven scales, the last of 12 x 12 or so; three images in two calls."""
    asked = [CategorizedPrompt("a fox", "simple"), CategorizedPrompt("two red dogs", "complex")]
    return Study(text, "a fox", 5, asked, 3, size={"pixel_budget": "0.06M"})


# Memory and arithmetic


@pytest.mark.parametrize("make", [tiny_var, tiny_infinity, tiny_hart])
def test_the_kv_cache_of_every_scale(make: Any) -> None:
    pipe = make()
    data = memory_per_scale.measure(Study(pipe, 1))
    backbone, total, expected = pipe.backbone, pipe.backbone.context, []
    for h, w in data["grids"]:
        total += h * w
        expected.append(2 * 4 * backbone.depth * 2 * total * backbone.width)  # keys and values, float32, guided
    assert data["kv_cache"] == expected
    assert data["kv_cache"][-1] == pipe.estimate().kv_cache
    assert data["activations"][-1] == pipe.estimate().blocks
    assert data["peak"] is None, "nothing is measured on a CPU"


def test_peaks_are_those_within_a_scale(label: Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    resets: list[int] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: resets.append(1))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**31 + 1000 * len(resets))
    found = memory_per_scale.peaks(Study(label, 4))
    assert found == [2**31 + 1000 * (k + 1) for k in range(8)], "reset before the run and after every scale"
    data = {**memory_per_scale.measure(Study(label, 4)), "peak": found}
    memory_per_scale.draw(data, tmp_path / "memory.png")


@pytest.mark.parametrize("make", [tiny_var, tiny_infinity])
def test_arithmetic_token_by_token(make: Any) -> None:
    pipe = make()
    backbone = pipe.backbone
    data = flops_over_size.measure(pipe, pipe.schedule())
    sides = [4, 5, 6, 7, 8] if make is tiny_var else [4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128]
    assert data["grids"] == [[side, side] for side in sides], "up to the largest size that the package makes"
    assert data["pixels"][0] == [4 * pipe.tokenizer.stride] * 2
    for n in (0, 2):
        tokens, total = sides[n] ** 2, 0
        for i in range(tokens):
            for part in backbone.sublayers:
                total += backbone.depth * backbone.flops(part, 1, i + 1 if part == "self" else 0)
        assert data["next_token"][n] == total + backbone.head_flops(tokens)
    seen, total = 0, 0
    for h, w in pipe.schedule().grids:
        if h > sides[0]:
            break
        seen += h * w
        total += backbone.head_flops(h * w)
        total += backbone.depth * sum(backbone.flops(p, h * w, seen if p == "self" else 0) for p in backbone.sublayers)
    assert data["next_scale"][0] == total
    assert all(a > b for a, b in zip(data["next_scale"], data["last_scale"], strict=True))


def test_arithmetic_is_that_of_the_trace(label: Pipeline) -> None:
    out = label(4, seed=0, guidance_scale=0.0)
    costs = Costs.of(label.backbone)
    assert flops_over_size.next_scale(costs, label.schedule()) == out.trace.image(0)["flops"]


# Frequencies


def test_the_spectrum_of_a_known_map() -> None:
    x = np.arange(16)
    wave = np.broadcast_to(3 * np.cos(2 * np.pi * 4 * x / 16), (2, 16, 16))
    amplitude = token_spectra.amplitude(wave)
    assert amplitude[8, 8 + 4] == pytest.approx(3 / 2 * 16)  # orthonormal: half an amplitude, times sqrt(256)
    assert amplitude.sum() == pytest.approx(2 * 3 / 2 * 16)
    curve = token_spectra.radial(amplitude)
    assert len(curve) == 8
    assert curve[3] > 0
    assert np.delete(curve, 3) == pytest.approx(0, abs=1e-9)
    noise = np.random.default_rng(0).choice((-0.5, 0.5), (64, 32, 32))
    assert token_spectra.radial(token_spectra.amplitude(noise)) == pytest.approx(0.5, rel=0.1), "white is flat"
    assert len(token_spectra.radial(token_spectra.amplitude(np.ones((3, 1, 1))))) == 0


def test_watched_codes_add_up_to_the_features(label: Pipeline, text: Pipeline) -> None:
    seen = watch(text, "a fox", 3, pixel_budget="0.06M")
    assert [c.shape[1:] for c in seen.codes] == seen.grids
    amplitude = text.tokenizer.config.code_dim**-0.5
    assert all(np.allclose(np.abs(c), amplitude) for c in seen.codes), "bits have one amplitude"
    total = torch.zeros(1, 4, *seen.grids[-1])
    for scale, codes in zip(text.schedule(pixel_budget="0.06M"), seen.codes, strict=True):
        rows = torch.from_numpy(codes).flatten(1).mT[None]
        total = text.tokenizer.add(total, rows, scale, text.schedule(pixel_budget="0.06M"))
        assert np.allclose(seen.features[scale.index], total[0].numpy(), atol=1e-5)
    assert watch(label, 4, 3).codes[-1].shape == (8, 8, 8)


# Several seeds


def test_seeds_of_many_images(study: Study) -> None:
    assert [(p.prompt, seed) for p, seed in study.images] == [
        ("a fox", 5),
        ("a fox", 7),
        ("a fox", 9),
        ("two red dogs", 6),
        ("two red dogs", 8),
        ("two red dogs", 10),
    ]
    one = with_seeds(study.prompts, 5)[1]
    assert one == [5, 6], "with one seed each as before"
    band = study.band
    assert band.about()["seeds"] == [5, 7, 9, 6, 8, 10]
    alone = watch(study.pipe, "two red dogs", 8, **study.size)
    assert band.conditional[4] == pytest.approx([m.mean() for m in alone.conditional], rel=1e-4)
    single = measure_band(study.pipe, [CategorizedPrompt("a fox")], 5, 2, **study.size)
    assert single.conditional.shape == (2, 7)
    only = Study(study.pipe, "a fox", 5, seeds=2, size=study.size)
    assert np.allclose(only.band.conditional, single.conditional)


# Pruning


def kept(pipe: Pipeline, method: Any, **size: Any) -> list[list[np.ndarray]]:
    """Per scale and layer, of one image."""
    out = pipe("a fox", seed=5, method=method, output_type="latent", **size)
    depth = pipe.backbone.depth
    return [[out.trace.kept(0, s.index + 1, j + 1) for j in range(depth)] for s in out.trace.schedule]


def test_pruning_keeps_exactly_what_it_says(study: Study) -> None:
    maps = {first: kept(study.pipe, Prune(0.5, first), **study.size) for first in ("low", "high", "random")}
    representative = max(round(ToProVAR().representative * 7), 2)
    for found in maps.values():
        for t, layers in enumerate(found, start=1):
            tokens = layers[0].size
            want = round(tokens * 0.5) if t > representative else tokens
            assert [layer.sum() for layer in layers] == [want] * len(layers)
            assert all((layer == layers[0]).all() for layer in layers), "out of all layers or of none"
    first = representative  # index of the first pruned scale: before it, all runs are equal
    assert (maps["low"][first][0] ^ maps["high"][first][0]).all(), "opposite halves"
    seen = kept(study.pipe, Prune(0.5, "low", (2,)), **study.size)
    assert [layer.all() for layer in seen[-1]] == [True, False, True, True]
    assert study.quality(Prune(0.0)).ssim == 1.0
    assert study.quality(Prune(0.0)).share == 1.0


def test_high_entropy_leaves_first(study: Study) -> None:
    representative = max(round(ToProVAR().representative * 7), 2)
    seen = watch(study.pipe, "a fox", 5, **study.size)
    assert seen.attention is not None
    assert seen.attention_scale == representative
    maps = torch.from_numpy(seen.attention / seen.attention.mean((1, 2), keepdims=True))
    grid = seen.grids[representative]
    enlarged = torch.nn.functional.interpolate(maps[:, None], size=grid, mode="bilinear").mean(0)[0]
    salient = kept(study.pipe, Prune(0.5, "low"), **study.size)[representative][0]
    assert float(enlarged[torch.from_numpy(salient)].max()) <= float(enlarged[torch.from_numpy(~salient)].min()) + 1e-5


def test_bad_pruning(label: Pipeline) -> None:
    for wrong, message in (({"share": 1.0}, "share must lie in"), ({"first": "x"}, "must be one of")):
        with pytest.raises(NextscaleError, match=message):
            Prune(**wrong)
    with pytest.raises(NextscaleError, match="begins behind scale 8, but this schedule has 8"):
        label(4, method=Prune(like=ToProVAR(representative=1.0)))


def test_halves_of_the_layers() -> None:
    assert layer_roles.split([1.0, 9.0, 2.0, 8.0, 3.0]) == {"global": (2, 4), "detail": (1, 3), "second": (2, 4)}
    assert layer_roles.split([1.0]) == {"global": (1,), "detail": (1,), "second": (1,)}


def test_quality_is_the_mean_over_images(study: Study) -> None:
    data = quality_curves.measure(study, {"a": Prune, "b": lambda share: Prune(share, "random")}, (0.5,))
    assert data["seeds"] == [5, 7, 9, 6, 8, 10]
    alike, shares = [], []
    for asked, seed in study.images:
        runs = [
            study.pipe(asked.prompt, seed=seed, method=m, output_type="pt", **study.size) for m in (None, Prune(0.5))
        ]
        alike.append(float(ssim(runs[0].images, runs[1].images, 1.0)))
        shares.append(runs[1].trace.share())
    (point,) = data["curves"]["a"]
    assert point["ssim"] == pytest.approx(np.mean(alike), abs=1e-3)
    assert point["share"] == pytest.approx(np.mean(shares), abs=1e-5)
    assert data["curves"]["b"][0]["share"] == pytest.approx(point["share"]), "equal counts"


def test_when_an_image_is_complete(study: Study) -> None:
    data = scale_depth.measure(study)
    assert data["categories"] == ["simple"] * 3 + ["complex"] * 3
    decoded: list[torch.Tensor] = []
    ask: Any = {"callback_on_scale_end": lambda end: decoded.append(end.decode()), **study.size}
    study.pipe("two red dogs", seed=8, **ask)
    assert data["ssim"][4] == pytest.approx([float(ssim(image, decoded[-1])) for image in decoded], abs=1e-3)
    assert [row[-1] for row in data["ssim"]] == [1.0] * 6


# Excluding


@pytest.mark.parametrize("measure", ["block", "logits", "image", "random"])
def test_excluding_an_exact_share(measure: str, study: Study) -> None:
    like = SparseVAR(start_scale=5 / 7, anchor=3)
    out = study.pipe("a fox", seed=5, method=Exclude(0.5, measure, like), output_type="latent", **study.size)
    for t in range(1, 8):
        layers = [out.trace.kept(0, t, j) for j in range(1, study.pipe.backbone.depth + 1)]
        tokens = layers[0].size
        assert all((layer == layers[0]).all() for layer in layers)
        assert layers[0].sum() == (tokens - round(tokens * 0.5) if t >= 5 else tokens)
        assert layers[0][::3, ::3].all(), "anchors stay"
    policy = out.trace.policy
    assert isinstance(policy, ExcludePolicy)
    assert policy.measured[0].shape == tuple(study.pipe.schedule(**study.size).grids[3])


def test_measures_are_what_they_say(study: Study) -> None:
    ends: list[tuple[ScaleEnd, torch.Tensor, torch.Tensor]] = []
    ask: Any = {
        "callback_on_scale_end": lambda end: ends.append((end, end.raw_logits.clone(), end.decode().clone())),
        **study.size,
    }
    study.pipe("a fox", seed=5, output_type="latent", **ask)
    like, t = SparseVAR(start_scale=6 / 7), 4  # index of the scale before the first sparse one
    seen = {}
    for name in ("block", "logits", "image"):
        policy = study.pipe("a fox", seed=5, method=Exclude(0.5, name, like), **study.size).trace.policy
        assert isinstance(policy, ExcludePolicy)
        seen[name] = policy.measured[0]
    block = round(0.5 * study.pipe.backbone.depth) - 1
    moved = watch(study.pipe, "a fox", 5, **study.size).moved[t][block]
    assert seen["block"] == pytest.approx(moved, rel=1e-4)
    grids = [end.scale.grid for end, _, _ in ends]
    change = (ends[t][2] - ends[t - 1][2])[0].abs().mean(0)
    side = change.shape[0] // grids[t][0], change.shape[1] // grids[t][1]
    pooled = change.view(grids[t][0], side[0], grids[t][1], side[1]).mean((1, 3)).numpy()
    assert seen["image"] == pytest.approx(pooled, abs=1e-5)
    maps = [raw[0].flatten(1).mT.unflatten(1, grid)[None] for (_, raw, _), grid in zip(ends, grids, strict=True)]
    before = torch.nn.functional.interpolate(maps[t - 1], size=grids[t], mode="bilinear")
    dot = (maps[t] * before).sum(1) / (maps[t].norm(dim=1) * before.norm(dim=1))
    assert seen["logits"] == pytest.approx(1 - dot[0].numpy(), abs=1e-5)


def test_bad_excluding(label: Pipeline) -> None:
    for wrong, message in (({"share": 1}, "share must lie in"), ({"measure": "x"}, "must be one of")):
        with pytest.raises(NextscaleError, match=message):
            Exclude(**wrong)
    with pytest.raises(NextscaleError, match="compare two scales before the first sparse one, which is 2"):
        label(4, method=Exclude(like=SparseVAR(start_scale=0.25)))


def test_blocks_of_an_equal_share(study: Study) -> None:
    data = exit_blocks.measure(study)
    assert data["blocks"] == [1, 2, 3, 4]
    shares = [point["share"] for point in (*data["quality"], data["random"])]
    assert shares == pytest.approx([shares[0]] * 5), "so that only the choice of cells differs"


def test_the_first_sparse_scales_of_table_5() -> None:
    curve = read_sweep("sparsevar-table5").curves["sparsevar"]
    methods = read_sweep("sparsevar-table5").methods
    starts = [methods[name].start_scale for name in curve]  # type: ignore[union-attr]
    assert [int(np.ceil(start * 13 - 1e-9)) for start in starts] == [6, 8, 9, 10, 11, 12]


# Restoring


@pytest.mark.parametrize("make", [tiny_infinity, tiny_var, tiny_hart])
def test_shares_of_equal_codes(make: Any) -> None:
    pipe = make()
    subject: Any = 4 if pipe.backbone.prompts == "label" else "a fox"
    if subject == "a fox":
        pipe = with_text(pipe)
    size: dict[str, Any] = {"pixel_budget": "0.06M", "aspect_ratio": 1.5} if make is tiny_infinity else {}
    data = restored_codes.measure(Study(pipe, subject, 5, size=size))
    assert data["codes"] == ("bits" if make is tiny_infinity else "codes")
    assert data["scales"] == list(range(3, len(data["grids"]) + 1))
    plain = pipe(subject, seed=5, output_type="latent", **size).tokens
    for t, found in zip(data["scales"], data["found"], strict=True):
        out = pipe(subject, seed=5, method=RestoreScale(t), output_type="latent", **size)
        mask = out.trace.kept(0, t, 1)
        (h, w), (old_h, old_w) = data["grids"][t - 1], data["grids"][t - 2]
        assert mask.sum() == h * w - h * w // 2
        equal: dict[str, list[float]] = {key: [] for key in ("repeated", "before", "plain", "kept")}
        for cell in range(h * w):
            y, x = divmod(cell, w)
            old = plain[t - 2][0, (y * old_h // h) * old_w + x * old_w // w]
            want, have = plain[t - 1][0, cell], out.tokens[t - 1][0, cell]
            equal["repeated"].append((want == old).float().mean().item())
            if mask[y, x]:
                equal["kept"].append((want == have).float().mean().item())
            else:
                equal["before"].append((have == old).float().mean().item())
                equal["plain"].append((have == want).float().mean().item())
        for key, values in equal.items():
            assert found[key] == pytest.approx(np.mean(values), abs=1e-5), key
        assert found["change"] > 0
    lines = restored_codes.table(data)
    assert len(lines) == 1 + len(data["scales"]) + 1 + 2
    assert lines[-3].startswith("  all")


def test_restoring_nothing_changes_nothing(study: Study) -> None:
    plain = restored_codes.run(study, "a fox", 5)
    again = restored_codes.run(study, "a fox", 5, RestoreScale(4, share=0.0))
    assert len(again.tokens) == 4, "the run ends with its scale"
    assert all(torch.equal(a, b) for a, b in zip(plain.tokens, again.tokens, strict=False))
    half = restored_codes.run(study, "a fox", 5, RestoreScale(4))
    assert all(torch.equal(a, b) for a, b in zip(plain.logits[:3], half.logits, strict=False))
    # The more certain half is restored.
    entropy = watch(study.pipe, "a fox", 5, **study.size).conditional[2]
    grid = study.pipe.schedule(**study.size).grids[3]
    known = torch.nn.functional.interpolate(torch.from_numpy(entropy)[None, None], size=grid, mode="bilinear").flatten()
    assert float(known[~half.kept[3]].max()) <= float(known[half.kept[3]].min()) + 1e-5
    for wrong, message in (({"scale": 1}, "scale must lie in"), ({"share": 1}, "share must lie in")):
        with pytest.raises(NextscaleError, match=message):
            RestoreScale(**wrong)
    with pytest.raises(NextscaleError, match="there is no scale 8: this schedule has 7"):
        study.pipe("a fox", method=RestoreScale(8), **study.size)
