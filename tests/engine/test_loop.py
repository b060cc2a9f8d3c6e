"""The properties that hold for every backbone (design: 2, 3, 4, 6), and what a policy can ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support.pipelines import ask, embeds, same_tokens
from support.rules import Rules, RulesPolicy, ragged_batches_equal_single_runs

from nextscale.cache.kv import KVCache
from nextscale.engine.rng import PerImageNoise
from nextscale.engine.schedule import INFINITY_GRIDS, PIXEL_BUDGETS, infinity_schedule
from nextscale.errors import NextscaleError
from nextscale.methods import NOVA, Truncate
from nextscale.methods.base import Method
from nextscale.methods.policy import Policy
from nextscale.models.infinity import rotary_table
from nextscale.testing import tiny_infinity, tiny_var

UNGUIDED = {"var": 0.0, "infinity": 1.0, "hart": 0.0}


def test_a_b_a(any_pipe) -> None:
    a = ask(any_pipe, 2)
    ask(any_pipe, 1, first=5, guidance_scale=2.0, greedy=True)
    again = ask(any_pipe, 2)
    assert same_tokens(a, again)
    assert [i.tobytes() for i in a.images] == [i.tobytes() for i in again.images]


def test_two_pipelines_do_not_touch_each_other() -> None:
    one, two = tiny_var(seed=0), tiny_var(seed=9)
    alone = ask(one)
    other = ask(two)
    assert same_tokens(alone, ask(one))
    assert not same_tokens(alone, other)


def test_no_state_is_left_on_modules(any_pipe) -> None:
    def contents() -> dict:
        return {
            name: {k: v for k, v in vars(m).items() if not k.startswith("_")}
            for module in (any_pipe.backbone, any_pipe.tokenizer)
            for name, m in module.named_modules()
        }

    before = contents()
    ask(any_pipe)
    assert contents() == before


class WatchedDraws(PerImageNoise):
    """Remembers the smallest distance, in log odds, at which a token won its race."""

    margin = torch.inf

    def categorical(self, probs, scale, images):
        race = (probs / self._exponential(probs, scale, images, "token")).log()
        first, second = race.topk(2, dim=-1).values.unbind(-1)
        self.margin = min(self.margin, (first - second).min().item())
        return super().categorical(probs, scale, images)


def test_a_batch_equals_single_runs(any_pipe, monkeypatch) -> None:
    watched: list[WatchedDraws] = []

    def make(seeds, device):
        watched.append(WatchedDraws(seeds, device))
        return watched[-1]

    monkeypatch.setattr("nextscale.engine.rng.PerImageNoise", make)
    batch = ask(any_pipe, 3)
    for i in range(3):
        single = ask(any_pipe, 1, first=i)
        assert all(torch.equal(b[i : i + 1], s) for b, s in zip(batch.tokens, single.tokens, strict=True))
    margin = watched[0].margin
    print(f"smallest decision margin {margin:.1e}")
    assert margin > 1e-4


def test_forced_tokens_give_equal_logits_in_any_batch(any_pipe) -> None:
    tokens = ask(any_pipe, 3).tokens
    collected: dict[str, list] = {"batch": [], "single": []}

    def keep(name):
        return lambda end: collected[name].append(end.logits)

    ask(any_pipe, 3, force_tokens=tokens, callback_on_scale_end=keep("batch"))
    ask(any_pipe, 1, first=2, force_tokens=[t[2:] for t in tokens], callback_on_scale_end=keep("single"))
    for b, s in zip(collected["batch"], collected["single"], strict=True):
        assert (b[2:] - s).abs().max() < 1e-4


def test_ragged_selections_in_a_batch_equal_single_runs(any_pipe) -> None:
    ragged_batches_equal_single_runs(any_pipe)


def test_the_trace_adds_up(any_pipe) -> None:
    result = ask(any_pipe, 2, method=Rules(keep=True, unguided=((1, 3),)))
    depth = any_pipe.backbone.depth
    for image in result.trace.to_dict()["images"]:
        kept = [(e["rows"], sum(layer["kept"] for layer in e["layers"])) for e in image["scales"]]
        assert image["row_tokens_computed"] == sum(rows * n for rows, n in kept)
        assert image["tokens_computed"] == sum(n for _, n in kept)
        assert result.trace.tokens(image["index"]) == image["tokens_computed"] / depth
        assert image["tokens_full"] == depth * sum(e["tokens"] for e in image["scales"])
        assert image["flops"] < image["flops_full"]
    plain = ask(any_pipe).trace.to_dict()["images"][0]
    assert plain["flops"] == plain["flops_full"]
    assert plain["row_tokens_computed"] == plain["row_tokens_full"]


def test_the_same_random_numbers_with_and_without_a_method(any_pipe) -> None:
    """A scale's draws do not depend on what happened before it."""
    seen: list[dict] = []

    class Noting(PerImageNoise):
        def _exponential(self, like, scale, images, stream):
            noise = super()._exponential(like, scale, images, stream)
            seen[-1].update({(scale, i): noise[row] for row, i in enumerate(images)})
            return noise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nextscale.engine.rng.PerImageNoise", Noting)
        for method in (None, Rules(keep=True, skip=((0, 2), (0, 5)), unguided=((0, 4),))):
            seen.append({})
            ask(any_pipe, 2, method=method)
    plain, reduced = seen
    assert len(reduced) == len(plain) - 2
    assert all(torch.equal(plain[key], noise) for key, noise in reduced.items())


def test_selecting_everything_is_close_to_selecting_nothing(any_pipe) -> None:
    @dataclass(frozen=True)
    class All(Rules):
        def start(self, context):
            policy = RulesPolicy(context, replace(self, keep=True))
            policy.kept = lambda image: policy.scale.tokens
            return policy

    logits: list[list] = []
    tokens = ask(any_pipe).tokens
    for method in (None, All()):
        logits.append([])
        ask(any_pipe, method=method, force_tokens=tokens, callback_on_scale_end=lambda e: logits[-1].append(e.logits))
    assert max((a - b).abs().max() for a, b in zip(*logits, strict=True)) < 1e-4


def test_teacher_forced_equals_cached(any_pipe) -> None:
    """One block-causal pass gives what the KV cache gave, scale by scale."""
    logits, maps = [], []

    def keep(end):
        logits.append(end.raw_logits)
        maps.append(end.features)

    options = {"guidance_scale": UNGUIDED[any_pipe.backbone.family]}
    ask(any_pipe, 2, callback_on_scale_end=keep, **options)
    backbone, tokenizer = any_pipe.backbone, any_pipe.tokenizer
    text = any_pipe.backbone.prompts == "text"
    schedule = any_pipe.schedule(pixel_budget="0.06M" if any_pipe.spec.pixel_budget else None)
    from nextscale.models.text_conditioning import TextCondition

    condition = TextCondition([embeds(3 + i, seed=i)[0] for i in range(2)]) if text else torch.tensor([0, 1])
    inputs = [None] + [tokenizer.inputs(m, s) for m, s in zip(maps, list(schedule)[1:], strict=False)]
    with torch.inference_mode():
        state = backbone.conditioning(condition, schedule, guided=False)
        whole = backbone.teacher_forced(state, inputs, schedule)
    assert (whole - torch.cat(logits, dim=1)).abs().max() < 1e-4


@pytest.mark.parametrize("ratio", INFINITY_GRIDS)
def test_every_aspect_ratio(infinity, patchified, ratio: float) -> None:
    for pipe in (infinity, patchified):
        out = pipe(prompt_embeds=embeds(4), aspect_ratio=ratio, pixel_budget="0.06M", seed=1, output_type="pt")
        h, w = INFINITY_GRIDS[ratio][PIXEL_BUDGETS["0.06M"] - 1]
        assert out.images.shape == (1, 3, h * pipe.tokenizer.stride, w * pipe.tokenizer.stride)
        by_size = pipe.schedule(height=h * pipe.tokenizer.stride, width=w * pipe.tokenizer.stride)
        assert by_size.grids == pipe.schedule(aspect_ratio=ratio, pixel_budget="0.06M").grids


def test_every_pixel_budget(infinity) -> None:
    for budget, scales in PIXEL_BUDGETS.items():
        assert len(infinity.schedule(pixel_budget=budget)) == scales
    out = infinity(prompt_embeds=embeds(4), pixel_budget="0.60M", seed=1, guidance_scale=1.0, output_type="latent")
    assert out.images.shape[-2:] == (48, 48)


def test_rows_leave_when_no_later_scale_is_guided(infinity) -> None:
    scales = 7
    rows = []
    weights = [3.0, 1.0, 2.0] + [1.0] * (scales - 3)
    out = ask(infinity, 2, guidance_scale=weights, callback_on_scale_end=lambda e: rows.append(len(e.hidden)))
    assert rows == [4, 4, 4, 2, 2, 2, 2]
    assert out.trace.share() == 1, "a plain run of these weights has no more rows"


def test_an_unguided_run_equals_the_conditional_branch(any_pipe) -> None:
    none = UNGUIDED[any_pipe.backbone.family]
    raw: list = []
    ask(any_pipe, guidance_scale=none, callback_on_scale_end=lambda e: raw.append((e.raw_logits, e.logits)))
    temperature = any_pipe.spec.defaults.temperature
    assert all(torch.equal(r / temperature, g) for r, g in raw)


def test_the_callback_sees_decodes_and_stops(any_pipe) -> None:
    images = []

    def look(end):
        images.append(end.decode())
        return False if end.scale.index == 3 else None

    stopped = ask(any_pipe, 2, callback_on_scale_end=look, output_type="pt")
    assert len(images) == 4
    assert all((t == -1).all() for t in stopped.tokens[4:])
    assert torch.equal(images[-1].add(1).div(2), stopped.images)
    full = ask(any_pipe, 2)
    assert all(torch.equal(a, b) for a, b in zip(stopped.tokens[:4], full.tokens, strict=False))
    traced = stopped.trace.to_dict()["images"][1]
    assert traced["stopped_after"] == 4
    assert traced["row_tokens_computed"] < traced["row_tokens_full"]


@pytest.mark.parametrize("method", [None, NOVA(t_est=2, alpha=0.0), Truncate(2)], ids=str)
def test_images_leave_when_the_callback_says_so(any_pipe, method) -> None:
    seen = []

    def look(end):
        seen.append(end.images)
        return {1: {0}, 3: {2, 0}}.get(end.scale.index, set())

    left, full = ask(any_pipe, 3, method=method, callback_on_scale_end=look), ask(any_pipe, 3, method=method)
    assert seen[:5] == [(0, 1, 2), (0, 1, 2), (1, 2), (1, 2), (1,)]
    for scale, (some, every) in enumerate(zip(left.tokens, full.tokens, strict=True)):
        assert torch.equal(some[1], every[1])
        assert (some[0] == -1).all() == (scale > 1)
        assert (some[2] == -1).all() == (scale > 3)
    assert [image["stopped_after"] for image in left.trace.to_dict()["images"]][::2] == [2, 4]
    with pytest.raises(NextscaleError, match=r"the callback returned the image 3; allowed: 0 to 2"):
        ask(any_pipe, 3, callback_on_scale_end=lambda e: {3})


def test_the_callback_sees_what_was_computed(any_pipe) -> None:
    shares = []
    out = ask(
        any_pipe,
        2,
        method=NOVA(t_est=2, alpha=0.0, tau=2),
        callback_on_scale_end=lambda e: shares.append(e.computed(1)),
    )
    assert all(np.array_equal(share, out.trace.computed(1, n)) for n, share in enumerate(shares, start=1))
    kept = [layer["kept"] for layer in out.trace.image(1)["scales"][-1]["layers"]]
    assert shares[-1].sum() == pytest.approx(np.mean(kept))
    assert 0 < shares[-1].mean() < 1


def test_the_callback_can_replace_the_features(any_pipe) -> None:
    maps = []
    ask(any_pipe, callback_on_scale_end=lambda e: maps.append(e.features))
    blank = ask(
        any_pipe,
        callback_on_scale_end=lambda e: torch.zeros_like(e.features) if e.scale.index == 2 else None,
        output_type="latent",
    )
    assert not torch.equal(blank.images, maps[-1])
    with pytest.raises(NextscaleError, match=r"the callback returned features of shape \[1\]"):
        ask(any_pipe, callback_on_scale_end=lambda e: torch.zeros(1))


def test_the_cache_grows_with_what_is_kept() -> None:
    cache = KVCache.empty(2, 1, 4, torch.float32, torch.device("cpu"))
    k = torch.arange(2 * 3 * 4.0).view(2, 1, 3, 4)
    cache.allocate(3)
    cache.append(k, k, torch.tensor([3, 1]))
    cache.allocate(2)
    cache.append(k[:, :, :2], k[:, :, :2], torch.tensor([1, 2]))
    assert cache.lengths.tolist() == [4, 3]
    assert cache.k.shape[2] == 5
    assert torch.equal(cache.k[1, 0, :3], torch.stack((k[1, 0, 0], k[1, 0, 0], k[1, 0, 1])))
    cache.keep_rows(torch.tensor([1]))
    assert cache.lengths.tolist() == [3]


def test_other_seeds_and_scales_draw_other_numbers() -> None:
    draws = PerImageNoise([1, 2])
    like = torch.empty(2, 5, 3)
    noise = draws.gumbel(like, 0, [0, 1])
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise, draws.gumbel(like, 1, [0, 1]))
    assert torch.equal(noise[1:], draws.gumbel(like[:1], 0, [1]))


def test_exponential_race_draws_from_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05]).expand(1, 40000, 4)
    counts = PerImageNoise([3]).categorical(probs, 0, [0])[0].bincount(minlength=4) / 40000
    assert (counts - probs[0, 0]).abs().max() < 0.01


def test_nan_weights_are_named() -> None:
    pipe = tiny_infinity()
    pipe.backbone.blocks[1].mlp.fc1.bias[0] = torch.nan
    with pytest.raises(NextscaleError, match=r"blocks\.1\.mlp\.fc1\.bias hold NaN"):
        ask(pipe)


def test_a_schedule_beyond_training(infinity, caplog) -> None:
    small, large = infinity_schedule(1.0, "1M"), infinity_schedule(1.0, "4M")
    assert large.grids[:13] == small.grids
    assert large.grids[13:] == ((96, 96), (128, 128))
    assert len(infinity_schedule(3.0, "4M")) == 15
    here = torch.device("cpu")
    a, b = rotary_table(16, small, here), rotary_table(16, large, here)
    assert torch.equal(a, b[: len(a)])
    # Every other cell of the doubled grid sits where the cells of the last trained one are, the others between them.
    last = b[-128 * 128 :].view(128, 128, 8, 2)
    assert torch.allclose(last[::2, ::2].flatten(0, 1), a[-64 * 64 :], atol=1e-5)
    assert not torch.isclose(last[1, 0], last[0, 0]).all()
    assert infinity.schedule(height=128 * 2, width=128 * 2).pixel_budget == "4M"
    infinity._known_sizes.clear()
    for _ in range(2):
        out = ask(infinity, 1, pixel_budget="4M", callback_on_scale_end=lambda end: end.scale.index < 3)
        assert out.images[0].size == (256, 256)
    assert caplog.text.count("no model was trained for 256x256") == 1, "said once for every size"


def test_maps_that_a_callback_keeps_stay_as_they_are(any_pipe) -> None:
    """Also where only some images of a batch run a scale."""
    kept, copies = [], []

    def keep(end):
        kept.append(end.features)
        copies.append(end.features.clone())

    ask(any_pipe, 3, method=Rules(skip=((1, 3), (0, 5))), callback_on_scale_end=keep)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_who_ends_at_the_last_scale_was_not_stopped(var) -> None:
    last = len(var.schedule()) - 1
    done = ask(var, 2, callback_on_scale_end=lambda end: end.scale.index < last)
    assert [i["stopped_after"] for i in done.trace.to_dict()["images"]] == [None, None]
    ended = ask(var, 2, callback_on_scale_end=lambda end: end.scale.index < last - 1)
    assert [i["stopped_after"] for i in ended.trace.to_dict()["images"]] == [last, last]


def test_forced_tokens_go_to_their_own_images(any_pipe) -> None:
    """When the first image rests, the second one's tokens are still its own."""
    tokens = ask(any_pipe, 3, seed=[11, 12, 13]).tokens
    assert not torch.equal(tokens[2][0], tokens[2][1])
    found = ask(any_pipe, 3, force_tokens=tokens, method=Rules(skip=((0, 2), (1, 4)))).tokens
    ran = {2: [1, 2], 4: [0, 2]}
    for k, want in enumerate(tokens):
        for image in ran.get(k, [0, 1, 2]):
            assert torch.equal(found[k][image], want[image]), (k, image)
    assert (found[2][0] == -1).all()


def test_the_lens_of_a_guided_prediction(any_pipe) -> None:
    """Of the last layer's output it is the prediction itself, guided by the scale's own weight."""
    seen: list = []

    class Looking(Policy):
        def finalize(self, x, ctx):
            self.lens = ctx.logit_lens(x, True), ctx.logit_lens(x, False)
            return super().finalize(x, ctx)

        def on_logits(self, x, raw, logits, ctx):
            weight = self.context.sampling.guidance[ctx.scale.index]
            conditional, unconditional = raw.chunk(2) if len(raw) > ctx.rows.images else (raw, raw)
            expected = weight * conditional + (1 - weight) * unconditional
            seen.append((weight, self.lens, (expected, conditional)))

    @dataclass(frozen=True)
    class Look(Method):
        name = "look"
        summary = "For tests."

        def start(self, context):
            return Looking(context)

    ask(any_pipe, 2, method=Look())
    assert max(weight for weight, _, _ in seen) > 2, "it was guided"
    for _, found, expected in seen:
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-4)
