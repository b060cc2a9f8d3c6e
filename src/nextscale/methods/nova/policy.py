"""NOVA at work on one call: when to start, how many tokens per scale and layer, and which."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.engine.rows import Rows
from nextscale.engine.schedule import Scale
from nextscale.methods.nova.growth import Growth
from nextscale.methods.nova.layer_linkage import MEAN, RATIO, LayerLinkage
from nextscale.methods.policy import (
    Activation,
    Decision,
    Explanation,
    Group,
    Numbers,
    PolicyContext,
    ScaleContext,
    ScalePlan,
)
from nextscale.methods.restore import CachedPolicy
from nextscale.methods.selection import Selection, for_rows, gather
from nextscale.methods.tables import read_table, relative_ratio
from nextscale.methods.token_cache import store_selected

if TYPE_CHECKING:
    from nextscale.methods.nova.method import NOVA

MAX_RATIO = math.nextafter(1.0, 0.0)  # of eq. 11
LENS_CODES = 256  # of a large codebook, `lens_topk` looks at the codes that were likeliest one scale before


class NOVAPolicy(CachedPolicy):
    def __init__(self, context: PolicyContext, method: NOVA) -> None:
        m = method
        super().__init__(
            context, m.cache, m.restore_mode, m.t_est, m.uncomputed, m.required, extends_restore=m.metric == "mse"
        )
        self.method = method
        self.tracks_computed |= method.rank == "scale"
        self.table = read_table(method.scale_table)
        self.growth = [Growth(method.t_est, method.alpha) for _ in range(context.images)]
        # Its memory, besides what layers added: the entropy of the final prediction ("final"); likely codes ("codes"),
        # for "lens_topk"; attention entropy ("attention") and how much each layer changed a cell ("moved"), for the
        # metrics of these names; what the head sees in the input of each layer ("lens"), for eq. 12 without a lens.
        self.pending: list[tuple[Scale, tuple[int, ...], Mapping[str, Numbers]]] = []  # not read yet
        self.ratio: dict[int, list[float]] = {}  # per scale, per image
        self.layer_ratio: dict[int, list[list[float]]] = {}  # per scale, per image, per layer: where the host knows it
        self.layer_means: dict[int, list[float]] = {}  # of an image, at the newest scale
        self.layer_entropy: dict[int, list[tuple[float, ...]]] = {}  # per scale, per image, per layer: the means used
        self.uploaded: list[list[float]] = []  # the ratios of every image's layers
        self.lens_means: list[Tensor] = []  # [B] of the layers of this scale, for the next one
        self.layer_stats: Tensor | None = None  # of the layers of a reduced scale, [layers, 4, B]: see `LayerLinkage`
        self.layer_reports: dict[int, tuple[tuple[int, ...], Mapping[str, Numbers]]] = {}  # per scale, of its layers
        self.probe = method.probe
        if self.probe == "auto":
            self.probe = "lens" if context.bits else "lens_topk"
        self.has_lens = self.probe != "previous"
        self.linkage = LayerLinkage(
            method.layer_linkage, method.probe_from_layer - 1, 1 - method.max_layer_keep, method.counts == "round"
        )
        self.links_on_device = method.layer_linkage and self.has_lens  # a layer's entropy is known when it begins
        self.may_keep_nothing = self.links_on_device and self.linkage.rounds
        self.measures_layers = method.layer_linkage and not self.has_lens  # for the scale behind
        self.measuring: dict[int, bool] = {}  # per scale, whether they are measured there
        self.ranks_by_lens = method.rank == "layer" and method.metric == "entropy" and self.has_lens
        ranks_anew = method.rank == "layer" and (self.ranks_by_lens or method.metric in ("attention", "mse"))
        # One selection serves the whole scale.
        self.shared_selection = not method.layer_linkage and not ranks_anew
        self.stores_final = method.rank == "scale" or not self.has_lens or method.probe_from_layer == 2
        # Whether complete layers leave something behind.
        self.records_layers = method.cache != "zero" or self.measures_layers or method.metric == "mse"
        # The other fields make the ratios, which are uploaded.
        key = method.without("alpha", "tau", "lam", "scale_linkage", "scale_table")
        self.capabilities = dataclasses.replace(self.capabilities, graph_key=key, warmup_calls=len(self._warmup_stars))

    # Between scales, on the host

    def plan_scale(self, scale: Scale) -> ScalePlan:
        t = scale.index + 1
        if t > self.method.t_est:  # before, nothing depends on them, and the device need not be waited for
            self._read_reports()
        self.lens_means, self.layer_stats = [], None  # those of an earlier scale
        images = range(self.context.images)
        self.ratio[t] = [self._ratio(g, t) for g in self.growth]
        if self.context.warmup is not None:
            plans = self._warmup_stars
            stars = plans[min(self.context.warmup, len(plans) - 1)]
            self.ratio[t] = [0.0 if star is None or t <= star else 0.5 for star in stars]
        self.layer_entropy[t] = [tuple(self.layer_means.get(image, ())) for image in images]
        self.layer_ratio[t] = [self._layer_ratios(image, self.ratio[t][image]) for image in images]
        if self.layer_ratio[t] != self.uploaded:
            self.uploaded = self.layer_ratio[t]
            by_layer = itertools.chain.from_iterable(zip(*self.uploaded, strict=True))
            self.layer_ratios = self.upload("ratios", list(by_layer)).view(self.context.depth, -1)
        if self.method.metric == "random":
            # The same tokens in all layers: else hardly a cell would pass through all of them.
            noise = torch.rand(scale.tokens, generator=torch.Generator().manual_seed(scale.index), dtype=torch.float32)
            self.upload(f"noise {t}", noise.double())
        records = self.records(scale)
        needs = frozenset({"attention_entropy"}) if self.method.metric == "attention" and records else frozenset()
        some, everyone = any(self.ratio[t]), all(self.ratio[t])  # which of them is the device's business
        self.measuring[t] = self.measures_layers and records and self._may_precede_reduced(scale)
        needs_hidden = some or (self.records_layers and records)
        actions = tuple(self._action(image, scale) for image in images)
        variant = some, everyone, self.measuring[t]
        return self.plan(scale, actions=actions, needs=needs, needs_hidden=needs_hidden, variant=variant)

    @property
    def _warmup_stars(self) -> list[list[int | None]]:
        """t* of every image, per warm-up call."""
        first, images = self.method.t_est + 1, self.context.images  # what tokens are restored from comes behind t_est
        calls: list[list[int | None]] = [[None] * images, [first] * images]
        if images > 1:
            calls.append([first, *[None] * (images - 1)])
        return calls

    def _read_reports(self) -> None:
        for scale, images, report in self.pending:
            t = scale.index + 1
            for image, entropy in zip(images, report["entropy"].tolist(), strict=True):
                # In graphs logits are checked when the host has time: until then, any number will do.
                self.growth[image].add(t, entropy if math.isfinite(entropy) else 0.0)
            for image, means in zip(images, report["means"].tolist(), strict=True) if "means" in report else ():
                self.layer_means[image] = means
        self.pending.clear()

    def _ratio(self, growth: Growth, t: int) -> float:
        """Eq. 11, or what a table says."""
        m = self.method
        if growth.star is None or t <= growth.star:
            return 0.0
        if not m.scale_linkage:
            return relative_ratio(self.table, t / len(self.context.schedule))
        latest = growth.latest(t) or 0.0  # the growth of scale t itself is not known yet
        ratio = 1 / (1 + math.exp(-(t - (growth.star + 1)) / m.tau)) - m.lam * math.tanh(latest)
        return min(max(ratio, 0.0), MAX_RATIO)

    def _may_precede_reduced(self, scale: Scale) -> bool:
        """Whether the next scale that runs may be reduced: a table tells it."""
        if self.method.scale_linkage:
            return True
        schedule = list(self.context.schedule)
        later = [relative_ratio(self.table, (s.index + 1) / len(schedule)) for s in schedule[scale.index + 1 :]]
        return next((ratio for ratio in later if ratio < 1), 0.0) > 0

    def _layer_ratios(self, image: int, ratio: float) -> list[float]:
        """What is known of them before the scale."""
        if self.links_on_device or not ratio:
            return [ratio] * self.context.depth
        return self.linkage.ratios(ratio, self.layer_means.get(image, [0.0] * self.context.depth))

    def _action(self, image: int, scale: Scale) -> str:
        """A scale in which nothing would be kept is left out; the rest, if that is so in all of it."""
        if not self._keeps_nothing(image, scale, self.ratio[scale.index + 1][image]):
            return "run"
        later = list(self.context.schedule)[scale.index + 1 :]
        ends = all(self._keeps_nothing(image, s, self._ratio(self.growth[image], s.index + 1)) for s in later)
        return "stop" if ends else "skip"

    def _keeps_nothing(self, image: int, scale: Scale, ratio: float) -> bool:
        """Whether too few layers keep anything, as far as that is known before the scale."""
        if not ratio or self.context.warmup is not None:
            return False
        if ratio >= 1:
            return True
        if self.links_on_device or not self.linkage.rounds:
            return False
        kept = [self.linkage.kept(r, scale.tokens) for r in self._layer_ratios(image, ratio)]
        return sum(count > 0 for count in kept) < max(self.required, 1)

    # Inside a scale, on the device

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        chosen = self._select(layer, x, ctx)
        if self.measuring[ctx.scale.index + 1]:
            self.lens_means.append(self._measure(layer, x, chosen, ctx))
        return chosen

    def _measure(self, layer: int, x: Tensor, chosen: Selection | None, ctx: ScaleContext) -> Tensor:
        """Mean entropy [B] of a layer's input; cells that the layer does not compute keep what was known of them."""
        own, images = None if chosen is None else chosen.first(ctx.rows.images), Rows(ctx.rows.image_ids, ())
        if ctx.fused_logit_lens is None:
            entropy = self._lens(layer, gather(x, chosen), ctx).double()[..., None]
        else:  # the kernel knows of most cells already
            entropy = gather(self._lens(layer, x, ctx).double()[..., None], own)
        cache, grid = self.memory["lens", layer], ctx.scale.grid
        store_selected(cache, images, grid, own, entropy, self.restore_mode)
        known = cache.read(images, grid, self.restore_mode)
        assert known is not None, "it was just stored"
        return known[..., 0].mean(1)

    def _select(self, layer: int, x: Tensor, ctx: ScaleContext) -> Selection | None:
        ratios = [self.ratio[ctx.scale.index + 1][image] for image in ctx.rows.image_ids]
        if not layer:
            self.chosen: Selection | None = None  # the newest of this scale
            self.lens_means, self.layer_stats = [], None
            if any(ratios):
                shape = self.context.depth, 4, ctx.rows.images
                self.layer_stats = torch.empty(shape, dtype=torch.float64, device=x.device)
                whole = range(self.context.depth)
                self.scale_score = None if self.method.rank == "layer" else self._rank(whole, ctx)
        if self.layer_stats is None or (self.shared_selection and self.chosen is not None):
            return self.chosen
        ratio = self.gather_rows(ctx.rows, self.layer_ratios[layer])
        if self.links_on_device or self.ranks_by_lens:
            entropy, mean = self._layer_entropy(layer, x, ctx)
            score = entropy if self.ranks_by_lens else self._score(layer, ctx)
            linkage = self.linkage if self.links_on_device else self.linkage._replace(linked=False)
        else:  # the host has done it
            entropy = score = self._score(layer, ctx)
            linkage, mean = self.linkage._replace(linked=False), ratio
        keep = functools.partial(linkage.keep, entropy, score, ratio, self.layer_stats, layer, mean=mean)
        self.chosen = for_rows(ctx.rows, keep)
        return self.chosen

    def _layer_entropy(self, layer: int, x: Tensor, ctx: ScaleContext) -> tuple[Tensor, Tensor | None]:
        """Of every token [B, N], and the layer's mean [B] if it is not theirs."""
        return self._final(ctx) if layer + 1 < self.method.probe_from_layer else self._lens(layer, x, ctx), None

    def _score(self, layer: int, ctx: ScaleContext) -> Tensor:
        """What the kept tokens have most of, [B, N]."""
        return self._rank([layer], ctx) if self.scale_score is None else self.scale_score

    def _rank(self, layers: Sequence[int], ctx: ScaleContext) -> Tensor:
        """What kept tokens have most of, [B, N], as it was at the scale before; in the mean over some layers."""
        metric = self.method.metric
        if metric == "entropy":
            return self._final(ctx)
        if metric == "random":
            return self.uploads[f"noise {ctx.scale.index + 1}"].expand(ctx.rows.images, -1)
        # Attention that is spread over everything looks at nothing; or how much a layer changed a cell.
        name, sign = ("attention", -1) if metric == "attention" else ("moved", 1)
        images = Rows(ctx.rows.image_ids, ())
        found = [self.memory[name, layer].read(images, ctx.scale.grid, self.method.restore_mode) for layer in layers]
        known = [map_[..., 0] for map_ in found if map_ is not None]
        assert known, "a reduced scale follows complete ones"
        return sign * (known[0] if len(known) == 1 else torch.stack(known).mean(0))

    def _final(self, ctx: ScaleContext) -> Tensor:
        """The newest entropy of every cell, [B, N]."""
        found = self.memory["final"].read(Rows(ctx.rows.image_ids, ()), ctx.scale.grid, self.method.restore_mode)
        assert found is not None, "a reduced scale follows complete ones"
        return found[..., 0]

    def _lens(self, layer: int, x: Tensor, ctx: ScaleContext) -> Tensor:
        """Entropy [B, N] of the prediction that the model's own head would make here."""
        codes = None
        if self.probe == "lens_topk":
            found = self.memory["codes"].read(Rows(ctx.rows.image_ids, ()), (1, 1), "nearest")
            assert found is not None, "a reduced scale follows complete ones"
            codes = found[:, 0]
        return ctx.lens_entropy(x, self.method.entropy_of == "guided", codes, self.method.unit)

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        restored = super().restore(layer, group, x, chosen, y, ctx)
        if self.method.metric == "mse" and self.records(ctx.scale):
            images = ctx.rows.images
            change = (restored[:images] - x[:images]).square().mean(-1, keepdim=True)
            self.memory["moved", layer].store(Rows(ctx.rows.image_ids, ()), ctx.scale.grid, change)
        return restored

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        m, rows, scale = self.method, ctx.rows, ctx.scale
        seen = logits if m.entropy_of == "guided" else raw[: rows.images]
        entropy = ctx.token_entropy(seen, m.unit)
        if self.computed is not None:  # elsewhere the newest that is known still holds
            known = self.memory["final"].read(Rows(rows.image_ids, ()), scale.grid, m.restore_mode)
            entropy = entropy if known is None else torch.where(self.computed, entropy, known[..., 0])
        self.entropy = entropy.double().mean(1)  # [B]
        if not self.records(scale):
            return
        if self.stores_final:
            self.memory["final"].store(Rows(rows.image_ids, ()), scale.grid, entropy[..., None])
        if self.probe == "lens_topk":
            likely = seen.softmax(-1).mean(1)
            codes = likely.topk(min(LENS_CODES, likely.shape[-1]), dim=-1).indices
            self.memory["codes"].store(Rows(rows.image_ids, ()), (1, 1), codes[:, None])
        for layer, map_ in enumerate(ctx.attention_entropy):
            self._store_attention(layer, map_[: rows.images], ctx)

    def _store_attention(self, layer: int, entropy: Tensor, ctx: ScaleContext) -> None:
        chosen = ctx.chosen[layer]["self"]
        own = None if chosen is None else chosen.first(len(entropy))
        images = Rows(ctx.rows.image_ids, ())
        cache = self.memory["attention", layer]
        store_selected(cache, images, ctx.scale.grid, own, entropy[..., None], self.restore_mode)

    def report(self, ctx: ScaleContext) -> dict[str, Tensor]:
        report = {"entropy": self.entropy}
        if self.lens_means:
            report["means"] = torch.stack(self.lens_means, dim=1)
        if self.layer_stats is not None and self.links_on_device:
            report["layers"] = self.layer_stats.movedim(-1, 0)
        return report

    def on_report(self, ctx: ScaleContext, report: Mapping[str, Numbers]) -> None:
        self.pending.append((ctx.scale, ctx.rows.image_ids, report))
        if "layers" in report:
            self.layer_reports[ctx.scale.index + 1] = (ctx.rows.image_ids, report)

    # For the trace

    def explain(self, image: int) -> Explanation:
        self._read_reports()
        g = self.growth[image]
        reduced = None if g.star is None or g.star == len(self.context.schedule) else g.star + 1
        decisions = {scale.index + 1: self._decision(image, scale.index + 1) for scale in self.context.schedule}
        return Explanation(Activation(reduced, g.star, g.reason, g.eta), decisions)

    def _decision(self, image: int, t: int) -> Decision:
        g, ratio = self.growth[image], self.ratio.get(t, [0.0] * self.context.images)[image]
        layer_entropy: tuple[float, ...] = ()
        layer_ratio: tuple[float, ...] = ()
        if t in self.layer_reports and image in self.layer_reports[t][0]:
            images, report = self.layer_reports[t]
            layer_stats = report["layers"]
            layer_entropy, layer_ratio = (tuple(layer_stats[images.index(image), :, n].tolist()) for n in (MEAN, RATIO))
        elif ratio and not self.links_on_device:
            layer_entropy, layer_ratio = self.layer_entropy[t][image], tuple(self.layer_ratio[t][image])
        return Decision(
            entropy=g.entropy.get(t),
            growth=g.growth(t),
            smoothed_growth=g.smoothed(t),
            ratio=ratio,
            layer_entropy=layer_entropy,
            layer_ratio=layer_ratio,
        )
