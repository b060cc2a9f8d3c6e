"""NOVA's decisions, recomputed by other means."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support.pipelines import ask

from nextscale import NOVA, Truncate
from nextscale.engine.entropy import token_entropy
from nextscale.engine.rows import Rows
from nextscale.kernels.sdpa import attention_entropy
from nextscale.methods.base import Method
from nextscale.methods.nova.growth import Growth
from nextscale.methods.nova.layer_linkage import LayerLinkage
from nextscale.methods.nova.policy import NOVAPolicy
from nextscale.methods.policy import Capabilities, Policy, ScaleContext
from nextscale.methods.selection import Packed, Selection, scatter, topk_select
from nextscale.methods.tables import read_table, relative_ratio
from nextscale.methods.token_cache import resize_tokens


def grow(entropies: list[float], t_est: int = 3, alpha: float = 0.5) -> Growth:
    growth = Growth(t_est, alpha)
    for t, value in enumerate(entropies, start=1):
        growth.add(t, value)
    return growth


def test_activation_with_made_up_entropies() -> None:
    # growth 1, 1: eta = 1; smoothed growth of scale 4 = (0 + 1) / 2 <= 0.5: as early as possible
    first = grow([0, 1, 2, 2, 3])
    assert (first.star, first.reason, first.eta) == (4, "inflection", 1)
    # smoothed 1.0, 0.75, 0.25: scale 6
    assert grow([0, 1, 2, 3, 3.5, 3.5]).star == 6
    never = grow([0, 1, 2, 3, 4, 5, 6])
    assert (never.star, never.reason) == (None, "never")
    flat = grow([2, 1, 0, 5, 9])
    assert (flat.star, flat.reason) == (4, "flat_start")
    assert flat.eta == -1
    assert grow([1, 1, 1, 1]).reason == "flat_start"
    assert grow([0, 1, 2]).star is None


def oracle(scales: list[dict], m: NOVA, layers: int) -> dict:
    """The paper's rules in a few lines, from the traced entropies alone."""
    h = {e["scale"]: e["entropy"] for e in scales if e["ran"]}
    g = {t: h[t] - h[t - 1] for t in range(2, len(scales) + 1) if t in h and t - 1 in h}
    eta = sum(g[t] for t in range(2, m.t_est + 1)) / (m.t_est - 1)
    smooth = {t: (g[t] + g[t - 1]) / 2 for t in range(m.t_est + 1, len(scales) + 1) if t in g}
    star = next((t for t in smooth if eta <= 0 or smooth[t] <= m.alpha * eta), None)
    ratios, kept, ran = {}, {}, {}
    means: list[float] = []
    for e in scales:
        t, n = e["scale"], e["tokens"]
        ratio = 0.0
        if star is not None and t > star:
            ratio = 1 / (1 + math.exp(-(t - (star + 1)) / m.tau)) - m.lam * math.tanh(g[max(k for k in g if k < t)])
            ratio = min(max(ratio, 0.0), math.nextafter(1, 0))
        ratios[t] = ratio
        means = [layer["entropy"] for layer in e["layers"]] or means  # of a scale that is left out: as before
        for j in range(layers):
            r = ratio
            if ratio > 0 and j > 0:
                mu = sum(means[:j]) / j
                r = min(max(ratio * (1 - (means[j] - mu) / mu), 0.0), 1.0)
            kept[t, j] = math.floor(n * (1 - r) + 0.5) if m.counts == "round" else max(n - math.floor(r * n), 1)
        ran[t] = sum(kept[t, j] > 0 for j in range(layers)) >= m.required * layers
    return {"eta": eta, "star": star, "g": g, "smooth": smooth, "ratios": ratios, "kept": kept, "ran": ran}


@pytest.mark.parametrize("preset", ["paper", "literal"])
@pytest.mark.parametrize("t_est", [2, 3, 5])
def test_an_oracle_agrees(any_pipe, t_est: int, preset: str) -> None:
    m = dataclasses.replace(NOVA.preset(preset), t_est=t_est)
    budget = {"pixel_budget": "0.25M"} if any_pipe.spec.pixel_budget else {}
    for image in ask(any_pipe, 3, method=m, **budget).trace.to_dict()["images"]:
        expected = oracle(image["scales"], m, any_pipe.backbone.depth)
        assert image["activation"]["eta"] == pytest.approx(expected["eta"], abs=1e-12)
        assert image["activation"]["star"] == expected["star"]
        for e in image["scales"]:
            t = e["scale"]
            assert e["ran"] == expected["ran"][t]
            if not e["ran"]:
                continue
            assert e["growth"] == expected["g"].get(t)
            assert e["smoothed_growth"] == expected["smooth"].get(t)
            assert e["ratio"] == pytest.approx(expected["ratios"][t], abs=1e-12)
            assert [layer["kept"] for layer in e["layers"]] == [
                expected["kept"][t, j] for j in range(any_pipe.backbone.depth)
            ]


def test_traced_entropies_are_those_of_the_conditional_logits(any_pipe) -> None:
    seen = []
    method = NOVA(t_est=2, rank="layer", uncomputed="sample")  # else cells that were not computed keep what they had
    out = ask(any_pipe, 1, method=method, callback_on_scale_end=lambda e: seen.append(e.raw_logits[:1]))
    for entry, logits in zip(out.trace.to_dict()["images"][0]["scales"], seen, strict=True):
        p = logits.double().softmax(-1)
        naive = -(p * p.log()).sum(-1)
        naive = naive.sum(-1) if naive.ndim == 3 else naive
        assert entry["entropy"] == pytest.approx(naive.mean().item(), abs=1e-5)


def test_the_most_certain_tokens_are_dropped(infinity) -> None:
    """At the first layer of the first reduced scale, against the model's own head on the embeddings."""
    method = NOVA.preset("literal")
    out = ask(infinity, 1, method=method)
    data = out.trace.to_dict()["images"][0]
    scale = data["activation"]["scale"]
    kept = torch.from_numpy(out.trace.kept(0, scale, 1)).flatten()
    entropies = []
    original = type(infinity.backbone).head

    def head(self, state, x, codes=None):
        logits = original(self, state, x, codes)
        entropies.append(token_entropy(logits))
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(infinity.backbone), "head", head)
        ask(infinity, 1, method=method)
    first_probe = entropies[scale - 1][0]  # one head per complete scale comes before it
    assert first_probe[kept].min() >= first_probe[~kept].max()


def policy_for(n: int, **fields) -> tuple[NOVAPolicy, ScaleContext]:
    from nextscale.engine.sampling import Sampling
    from nextscale.engine.schedule import Schedule
    from nextscale.methods.policy import PolicyContext

    schedule = Schedule.squares((1, 2, 3, 4, 6, 8, 10))
    sampling = Sampling.make(len(schedule), guidance=(1.0,) * len(schedule))
    policy = NOVAPolicy(PolicyContext(1, schedule, sampling, 1, ("self", "ffn")), NOVA(t_est=2, **fields))
    ctx = ScaleContext(list(schedule)[n], Rows((0,), ()), lambda *a: torch.zeros(1))
    return policy, ctx


@pytest.mark.parametrize("mode", ["nearest", "area", "bilinear", "bicubic"])
def test_a_constant_layer_is_restored_exactly(mode: str) -> None:
    policy, finalize = policy_for(4, restore_mode=mode)
    x = torch.randint(-8, 8, (1, 36, 5)).float()
    policy.restore(0, ("self", "ffn"), x, None, x + 0.25, finalize)
    reduced = ScaleContext(list(policy.context.schedule)[5], finalize.rows, finalize.logit_lens)
    x = torch.randint(-8, 8, (1, 64, 5)).float()
    chosen = Selection(torch.tensor([[3, 7, 8]]), torch.tensor([3]))
    out = policy.restore(0, ("self", "ffn"), x, chosen, x[:, [3, 7, 8]] + 0.25, reduced)
    assert torch.equal(out, x + 0.25)
    # The cache has aged by one scale and still says the same.
    assert torch.equal(
        policy.memory["added", 0, ("self", "ffn")].read(finalize.rows, (8, 8), mode), torch.full((1, 64, 5), 0.25)
    )


def test_what_fills_the_holes() -> None:
    for cache, expected in (("residual", 3 + 2.0), ("feature", 9.0), ("zero", 3.0)):
        policy, finalize = policy_for(4, cache=cache)
        policy.restore(0, ("self",), torch.full((1, 36, 1), 7.0), None, torch.full((1, 36, 1), 9.0), finalize)
        reduced = ScaleContext(list(policy.context.schedule)[5], finalize.rows, finalize.logit_lens)
        x = torch.full((1, 64, 1), 3.0)
        chosen = Selection(torch.tensor([[5]]), torch.tensor([1]))
        out = policy.restore(0, ("self",), x, chosen, torch.tensor([[[100.0]]]), reduced)
        assert out[0, 5] == 100
        assert out[0, 6] == expected, cache


def test_keep_highest() -> None:
    score = torch.tensor([[1.0, 5.0, 3.0, 3.0, 0.0], [9.0, 8.0, 7.0, 6.0, 5.0]])
    chosen = topk_select(score, torch.tensor([2, 4]))
    assert chosen.index[0, :2].tolist() == [1, 2]  # of equal scores the earlier cell
    assert chosen.index[1].tolist() == [0, 1, 2, 3]
    assert chosen.mask(5).tolist() == [[False, True, True, False, False], [True, True, True, True, False]]
    twice = topk_select(score, torch.tensor([2, 4]), copies=2)
    assert twice.count.tolist() == [2, 4, 2, 4]
    assert torch.equal(twice.mask(5), chosen.mask(5).repeat(2, 1))


@pytest.mark.parametrize("rounds", [False, True])
def test_no_token_or_at_least_one_stays(rounds: bool) -> None:
    rule = LayerLinkage(linked=True, rounds=rounds)
    for tokens in (1, 2, 3, 100, 4096, 16129):
        layer_stats = torch.zeros(2, 4, 1, dtype=torch.float64)
        for layer, mean in enumerate((1.0, 1e-9)):  # the second layer is far surer than the first
            rule.update(torch.tensor([mean]).double(), torch.ones(1).double(), layer_stats, layer, tokens)
        assert layer_stats[:, 3, 0].tolist() == [0, 0] if rounds else [1, 1]


@pytest.mark.parametrize("rule", [LayerLinkage(True), LayerLinkage(True, 1, 0.3), LayerLinkage(False, rounds=False)])
def test_the_host_links_layers_as_the_device_does(rule: LayerLinkage) -> None:
    means = torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means[4] = 0
    for ratio in (0.0, 0.4, 0.97, 1.0):
        layer_stats = torch.zeros(7, 4, 1, dtype=torch.float64)
        for layer in range(7):
            rule.update(means[layer : layer + 1], torch.tensor([ratio], dtype=torch.float64), layer_stats, layer, 100)
        ratios = rule.ratios(ratio, means.tolist())
        assert ratios == pytest.approx(layer_stats[:, 1, 0].tolist(), abs=1e-12)
        assert [rule.kept(r, 100) for r in ratios] == layer_stats[:, 3, 0].tolist()


@pytest.mark.parametrize("preset", ["paper", "literal"])
@pytest.mark.parametrize("table", ["fastvar", "3/13:0.5 7/13:1 8/13:0.5 1:1"])
def test_a_ratio_of_one_leaves_the_scale_out(any_pipe, table: str, preset: str) -> None:
    """As in FastVAR, however tokens are counted; with the table of its own, all that follow, too."""
    ratios = {"t_est": 2, "alpha": 10.0, "scale_linkage": False, "scale_table": table}
    method = dataclasses.replace(NOVA.preset(preset), **ratios)
    out = ask(any_pipe, 2, method=method)
    for image in out.trace.to_dict()["images"]:
        star, scales = image["activation"]["star"], image["scales"]
        ratios = [relative_ratio(read_table(table), e["scale"] / len(scales)) * (e["scale"] > star) for e in scales]
        assert [e["ran"] for e in scales] == [r < 1 for r in ratios]
        assert 1 in ratios
        ran = [e["scale"] for e in scales if e["ran"]]
        assert image["stopped_after"] == (ran[-1] if ran[-1] < len(scales) else None)
        for e, tokens in zip(scales, out.tokens, strict=True):
            assert e["ran"] or (tokens[image["index"]] == -1).all()


def test_a_scale_in_which_no_cell_reaches_the_layers_it_needs_is_left_out(infinity) -> None:
    method = NOVA(t_est=2, alpha=10, tau=0.2, layer_linkage=False)
    out = ask(infinity, 1, method=method)
    image = out.trace.to_dict()["images"][0]
    policy, depth = out.trace.policy, infinity.backbone.depth
    left_out = [e for e in image["scales"] if not e["ran"]]
    assert left_out
    for e in left_out:
        ratios = policy.layer_ratio[e["scale"]][0]
        assert sum(math.floor(e["tokens"] * (1 - r) + 0.5) > 0 for r in ratios) < depth / 2
    assert image["stopped_after"] == left_out[0]["scale"] - 1
    literal = ask(infinity, 1, method=dataclasses.replace(NOVA.preset("literal"), t_est=2, alpha=10, tau=0.2))
    assert all(e["ran"] and min(x["kept"] for x in e["layers"]) > 0 for e in literal.trace.image(0)["scales"])


class LooksAtTheLastState(Policy):
    capabilities = Capabilities(selects=False)

    def finalize(self, x, ctx):
        self.lens = ctx.logit_lens(x, True)
        return x, None

    def on_logits(self, x, raw, logits, ctx) -> None:
        assert torch.equal(self.lens, logits)


@dataclasses.dataclass(frozen=True)
class Looks(Method):
    name, summary = "looks", "Compares the guided lens of the last state with the prediction."

    def start(self, context) -> Policy:
        return LooksAtTheLastState(context)


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"guidance_layers": -1, "temperature": 2.0}], ids=str)
def test_the_guided_lens_follows_the_rule_of_the_prediction(any_pipe, options: dict) -> None:
    ask(any_pipe, 2, method=Looks(), **options)


def test_token_entropy() -> None:
    logits = torch.randn(2, 7, 50)
    p = logits.softmax(-1)
    assert torch.allclose(token_entropy(logits), -(p * p.log()).sum(-1), atol=1e-5)
    bits = torch.randn(2, 7, 6, 2) * 3
    p = bits.softmax(-1)
    each = -(p * p.log()).sum(-1)
    assert torch.allclose(token_entropy(bits), each.sum(-1), atol=1e-5)
    assert torch.allclose(token_entropy(bits, "bit"), each.mean(-1), atol=1e-5)
    assert token_entropy(torch.tensor([[[[500.0, -500.0]]]])).item() == 0


@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_attention_entropy(spread: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 70, 16) * spread, torch.randn(2, 3, 90, 16)
    mask = (torch.arange(90) < torch.tensor([[90], [40]]))[:, None, None]
    scores = (q.double() @ k.double().transpose(-1, -2) * 0.7).masked_fill(~mask, -torch.inf)
    a = scores.softmax(-1)
    naive = -(a * a.clamp_min(1e-300).log()).sum(-1).mean(1)
    assert (attention_entropy(q, k, 0.7, mask, chunk=32) - naive).abs().max() < 1e-3


@pytest.mark.parametrize("required", [0.5, 1.0])
@pytest.mark.parametrize("uncomputed", ["auto", "nothing", "sample"])
def test_uncomputed_cells(infinity, uncomputed: str, required: float) -> None:
    """The map changes at the last scale exactly where enough layers computed, or everywhere; tokens say so."""
    maps, last = [], 7  # scales of the small schedule
    method = NOVA(t_est=5, uncomputed=uncomputed, required=required)
    out = ask(infinity, 1, method=method, callback_on_scale_end=lambda e: maps.append(e.features[0].clone()))
    assert out.trace.to_dict()["images"][0]["activation"]["scale"] <= last
    kept = [torch.from_numpy(out.trace.kept(0, last, layer)) for layer in range(1, infinity.backbone.depth + 1)]
    computed = torch.stack(kept).sum(0) >= required * infinity.backbone.depth
    assert 0 < computed.sum() < computed.numel()
    changed = (maps[-1] != maps[-2]).any(0)
    assert torch.equal(changed, torch.ones_like(computed) if uncomputed == "sample" else computed)
    assert torch.equal((out.tokens[-1][0] >= 0).all(-1), changed.flatten())


@pytest.mark.parametrize("method", [NOVA(t_est=2, alpha=10, tau=2.0), NOVA(t_est=2, alpha=10) + Truncate(1)])
def test_tokens_given_back_make_the_same_image(infinity, var, method) -> None:
    for pipe in (infinity, var):
        out = ask(pipe, 2, method=method, output_type="latent")
        assert pipe is var or (torch.cat([t.flatten() for t in out.tokens]) == -1).any()
        again = ask(pipe, 2, force_tokens=out.tokens, output_type="latent")
        assert torch.equal(again.images, out.images)
        assert all(map(torch.equal, again.tokens, out.tokens))


def test_layers_are_measured_only_where_a_reduced_scale_may_follow(var, monkeypatch) -> None:
    looked = []

    def look(self, layer: int, x: torch.Tensor, ctx: ScaleContext) -> torch.Tensor:
        looked.append((ctx.scale.index + 1, x.shape[1]))
        return torch.ones(ctx.rows.images, x.shape[1])

    monkeypatch.setattr(NOVAPolicy, "_lens", look)

    def measured(**fields) -> list[int]:
        looked.clear()
        ask(var, 1, method=NOVA(t_est=3, **fields))
        return sorted({t for t, _ in looked})

    assert measured(alpha=0.0) == [4, 5, 6, 7], "any scale behind t_est may be t*"
    assert measured(alpha=10.0, tau=2.0) == [4, 5, 6, 7]
    assert all(tokens < t * t for t, tokens in looked if t > 4), "of reduced ones what a layer computes"
    table = {"alpha": 10.0, "scale_linkage": False}
    assert measured(scale_table="6/8:0 7/8:0.5 1:0.5", **table) == [6, 7]
    assert measured(scale_table="6/8:0 7/8:1 1:0.5", **table) == [6], "the scale between is left out"
    assert measured(scale_table="6/8:0 7/8:1 1:1", **table) == []
    assert measured(layer_linkage=False) == []


@pytest.mark.parametrize("count", [0, 3])
def test_an_empty_scale_adds_nothing_even_if_cells_are_sampled(count: int) -> None:
    """With a lens the host does not know it before."""
    policy, ctx = policy_for(5, probe="lens", uncomputed="sample")
    ctx.chosen.append({"self": topk_select(torch.rand(1, 64), torch.tensor([count]))})
    _, weight = policy.finalize(torch.zeros(1, 64, 4), ctx)
    assert weight.tolist() == [[float(count > 0)] * 64]


def test_with_one_selection_nothing_has_to_be_restored(infinity) -> None:
    """All layers leave out the same cells, and these add nothing: what the cache says is never seen."""
    once = {"t_est": 3, "alpha": 10.0, "layer_linkage": False, "probe": "previous", "uncomputed": "nothing"}
    zero, residual = (
        ask(infinity, 2, method=NOVA(cache=c, **once), output_type="latent") for c in ("zero", "residual")
    )
    assert zero.trace.share() < 0.9
    assert torch.equal(zero.images, residual.images)
    scales = zero.trace.to_dict()["images"][0]["scales"]
    assert [e["entropy"] for e in scales] == [
        e["entropy"] for e in residual.trace.to_dict()["images"][0]["scales"]
    ]  # cells that were not computed keep the entropy that was known of them


def packed(chosen: Selection, tokens: int) -> Packed:
    """As a kernel gives it."""
    return Packed.of_mask(chosen.mask(tokens))


@torch.no_grad()
@pytest.mark.parametrize("cache", ["residual", "zero"])
@pytest.mark.parametrize("probe", ["lens", "previous"])
def test_a_lens_that_follows_filled_holes_sees_the_same(
    infinity, patchified, monkeypatch, cache: str, probe: str
) -> None:
    """What a GPU does, with every kernel written in torch: the lens looks at a scale's first state, and then only at
    what its layers changed."""
    looked = dict.fromkeys(("whole", "filled", "recorded"), 0)

    def restore(x, cached, grids, mode, chosen, stream, on_features=None, moments=None):
        before = resize_tokens(cached.float(), *grids, mode)
        filled = scatter(x + before, chosen, chosen.padded(stream.sum))
        if on_features is not None:
            on_features.copy_(filled - x)
        if moments is not None:
            few = filled[: len(moments)]
            moments.copy_(torch.stack((few.mean(-1), few.var(-1, unbiased=False)), dim=-1))
        return x.copy_(filled)

    def record(x, stream, on_features):
        looked["recorded"] += 1
        on_features.copy_(stream.sum - x)
        return x.copy_(stream.sum)

    def put(x, chosen, stream, moments=None):
        filled = scatter(x, chosen, chosen.padded(stream.sum))
        if moments is not None:  # only of what changes
            few, kept = filled[: len(moments)], (chosen.slot[: len(moments)] >= 0)[..., None]
            new = torch.stack((few.mean(-1), few.var(-1, unbiased=False)), dim=-1)
            moments.copy_(torch.where(kept, new, moments))
        return x.copy_(filled)

    def entropy_of(products, mean, variance, head, unit):
        z = (products - mean[..., None] * head.total[:, None]) / (variance + head.eps).sqrt()[..., None]
        z = z + head.term[:, None]
        return token_entropy(torch.stack((torch.zeros_like(z), z), dim=-1), unit)

    def whole(x, head, unit):
        looked["whole"] += 1
        products, moments = x @ head.factor, torch.stack((x.mean(-1), x.var(-1, unbiased=False)), dim=-1)
        return entropy_of(products, *moments.unbind(-1), head, unit), products, moments

    def filled(state, look, head, unit):
        looked["filled"] += 1
        images = len(look.products)
        kept, received = (state.chosen.slot[:images] >= 0)[..., None], 0
        if state.cached is not None:
            received = resize_tokens(state.cached[:images].float() @ head.factor, *state.grids, state.mode)
        look.products.copy_(torch.where(kept, state.x[:images] @ head.factor, look.products + received))
        look.entropy.copy_(entropy_of(look.products, *look.moments.unbind(-1), head, unit))

    keep = LayerLinkage.keep
    method = NOVA(t_est=2, alpha=10, probe=probe, max_layer_keep=0.4, cache=cache)
    for pipe in (infinity, patchified):
        expected = ask(pipe, images=2, method=method)
        with monkeypatch.context() as patch:
            patch.setattr("nextscale.kernels.restore.supports", lambda x: True)
            patch.setattr("nextscale.kernels.restore.fused_scatter", put)
            patch.setattr("nextscale.kernels.restore.fused_record", record)
            patch.setattr("nextscale.kernels.restore.fused_restore", restore)
            patch.setattr("nextscale.kernels.logit_lens.supports", lambda x: True)
            patch.setattr("nextscale.kernels.logit_lens.fused_logit_lens", whole)
            patch.setattr("nextscale.kernels.logit_lens.fused_restored_logit_lens", filled)
            patch.setattr("nextscale.runtime.eager.supports_packed", lambda backbone: True)
            patch.setattr(
                LayerLinkage, "keep", lambda rule, e, *rest, **more: packed(keep(rule, e, *rest, **more), e.shape[1])
            )
            found = ask(pipe, images=2, method=method)
        assert all(map(torch.equal, found.tokens, expected.tokens))
        pairs = zip(found.trace.to_dict()["images"], expected.trace.to_dict()["images"], strict=True)
        scales = [both for a, b in pairs for both in zip(a["scales"], b["scales"], strict=True)]
        for new, old in scales:
            assert [e["kept"] for e in new["layers"]] == [e["kept"] for e in old["layers"]]
            assert [e["entropy"] for e in new["layers"]] == pytest.approx([e["entropy"] for e in old["layers"]])
        reduced = {new["scale"] for new, _ in scales if new["ratio"]}
        assert reduced
        # Of every reduced scale the first layer is looked at as a whole, and no other.
        depth, complete = pipe.backbone.depth, 0
        if probe == "previous":  # for the scale behind: of the complete scale before them, but not of the last one
            reduced, complete = reduced - {len(pipe.schedule(pixel_budget="0.06M"))}, 1
        assert looked["whole"] == len(reduced) + complete * depth
        assert looked["filled"] == len(reduced) * (depth - 1)
        assert bool(looked["recorded"]) == (cache == "residual")
        looked.update(dict.fromkeys(looked, 0))
