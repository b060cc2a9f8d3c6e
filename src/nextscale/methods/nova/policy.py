"""NOVA at work on one call: when to start, how many tokens per scale and layer, and which."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.engine.rows import Rows
from nextscale.engine.schedule import Scale
from nextscale.methods.nova.growth import Growth
from nextscale.methods.nova.layer_linkage import MAX_RATIO, MEAN, RATIO, LayerLinkage
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
from nextscale.methods.selection import Selection, for_rows
from nextscale.methods.tables import read_table, relative_ratio
from nextscale.methods.token_cache import store_selected

if TYPE_CHECKING:
    from nextscale.methods.nova.method import NOVA

LENS_CODES = 256  # of a large codebook, `lens_topk` looks at the codes that were likeliest one scale before


class NOVAPolicy(CachedPolicy):
    def __init__(self, context: PolicyContext, method: NOVA) -> None:
        super().__init__(
            context, method.cache, method.restore_mode, method.t_est, method.uncomputed, method.metric == "mse"
        )
        self.method = method
        self.table = read_table(method.scale_table)
        self.growth = [Growth(method.t_est, method.alpha) for _ in range(context.images)]
        # Its memory, besides what layers added: the entropy of the final prediction ("final") and of layers ("mean"),
        # for the probe "previous"; likely codes ("codes"), for "lens_topk"; attention entropy ("attention") and how
        # much each layer changed a cell ("moved"), for the metrics of these names.
        self.pending: list[tuple[Scale, tuple[int, ...], Mapping[str, Numbers]]] = []  # not read yet
        self.ratio: dict[int, list[float]] = {}  # per scale, per image
        self.layer_reports: dict[
            int, tuple[tuple[int, ...], Mapping[str, Numbers]]
        ] = {}  # per scale, what layers reported
        self.layer_stats: Tensor | None = None  # of the layers of a reduced scale, [layers, 4, B]: see `LayerLinkage`
        self.linkage = LayerLinkage(
            method.layer_linkage,
            method.probe_from_layer - 1,
            min(1 - method.max_layer_keep, MAX_RATIO),
            method.allow_empty,
        )
        self.probe = method.probe
        if self.probe == "auto":
            self.probe = "lens" if context.bits else "lens_topk"
        # Whether complete layers leave something behind.
        self.records_layers = method.cache != "zero" or self.probe == "previous" or method.metric == "mse"
        # The other fields make the ratios, which are uploaded.
        key = method.without("alpha", "tau", "lam", "scale_linkage", "scale_table")
        self.capabilities = dataclasses.replace(self.capabilities, graph_key=key, warmup_calls=len(self._warmup_stars))
        # What a layer sees then does not depend on the layer: one selection serves the whole scale.
        self.shared_selection = (
            self.probe == "previous" and not method.layer_linkage and method.metric in ("entropy", "random")
        )

    # Between scales, on the host

    def plan_scale(self, scale: Scale) -> ScalePlan:
        t = scale.index + 1
        if t > self.method.t_est:  # before, nothing depends on them, and the device need not be waited for
            self._read_entropies()
        self.ratio[t] = [self._ratio(g, t) for g in self.growth]
        if self.context.warmup is not None:
            plans = self._warmup_stars
            stars = plans[min(self.context.warmup, len(plans) - 1)]
            self.ratio[t] = [0.0 if star is None or t <= star else 0.5 for star in stars]
        if self.ratio[t] != self.ratio.get(t - 1):
            self.scale_ratio = self.upload("ratio", self.ratio[t])
        if self.method.metric == "random":
            # The same tokens in all layers: else hardly a cell would pass through all of them.
            noise = torch.rand(scale.tokens, generator=torch.Generator().manual_seed(scale.index), dtype=torch.float32)
            self.upload(f"noise {t}", noise.double())
        needs = (
            frozenset({"attention_entropy"})
            if self.method.metric == "attention" and self.records(scale)
            else frozenset()
        )
        some, everyone = any(self.ratio[t]), all(self.ratio[t])  # which of them is the device's business
        needs_hidden = some or (self.records_layers and self.records(scale))
        return self.plan(scale, needs=needs, needs_hidden=needs_hidden, variant=(some, everyone))

    @property
    def _warmup_stars(self) -> list[list[int | None]]:
        """t* of every image, per warm-up call."""
        first, images = self.method.t_est + 1, self.context.images  # what tokens are restored from comes behind t_est
        calls: list[list[int | None]] = [[None] * images, [first] * images]
        if self.probe == "previous":  # the layers' entropies lie here or there, by how often they were stored
            calls.append([first + 1] * images)
        if images > 1:
            calls += [[star, *[None] * (images - 1)] for star in {c[0] for c in calls[1:]}]
        return calls

    def _read_entropies(self) -> None:
        for scale, images, report in self.pending:
            t = scale.index + 1
            for image, entropy in zip(images, report["entropy"].tolist(), strict=True):
                # In graphs logits are checked when the host has time: until then, any number will do.
                self.growth[image].add(t, entropy if math.isfinite(entropy) else 0.0)
        self.pending.clear()

    def _ratio(self, growth: Growth, t: int) -> float:
        m = self.method
        if growth.star is None or t <= growth.star:
            return 0.0
        if m.scale_linkage:
            latest = growth.latest(t) or 0.0  # the growth of scale t itself is not known yet
            ratio = 1 / (1 + math.exp(-(t - (growth.star + 1)) / m.tau)) - m.lam * math.tanh(latest)
        else:
            ratio = relative_ratio(self.table, t / len(self.context.schedule))
        return min(max(ratio, 0.0), MAX_RATIO)

    # Inside a scale, on the device

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        t, rows = ctx.scale.index + 1, ctx.rows
        ratios = [self.ratio[t][image] for image in rows.image_ids]
        if not layer:
            self.chosen: Selection | None = None  # the newest of this scale
            self.layer_stats = None
            if any(ratios):
                self.layer_stats = torch.empty(self.context.depth, 4, rows.images, dtype=torch.float64, device=x.device)
        if self.probe == "previous" and self.method.layer_linkage and self.records(ctx.scale) and not all(ratios):
            # A complete scale is the only chance to learn the layers' entropies of an image.
            images = Rows(rows.image_ids, ())
            mean = self._lens(layer, x, ctx).double().mean(1)[:, None, None]
            known = self.memory["mean", layer].read(images, (1, 1), "nearest")
            if known is not None:
                mean = torch.where(self.gather_rows(rows, self.scale_ratio)[:, None, None] > 0, known, mean)
            self.memory["mean", layer].store(images, (1, 1), mean)
        if self.layer_stats is None:
            return None
        if self.shared_selection and self.chosen is not None:
            self.layer_stats[layer] = self.layer_stats[0]
            return self.chosen
        entropy, known_mean = self._layer_entropy(layer, x, ctx)
        score, ratio = self._score(layer, entropy, ctx), self.gather_rows(rows, self.scale_ratio)
        keep = functools.partial(self.linkage.keep, entropy, score, ratio, self.layer_stats, layer, mean=known_mean)
        self.chosen = for_rows(rows, keep)
        return self.chosen

    def _lens(self, layer: int, x: Tensor, ctx: ScaleContext) -> Tensor:
        """Entropy [B, N] of the prediction that the model's own head would make here."""
        codes = None
        if self.probe == "lens_topk":
            found = self.memory["codes"].read(Rows(ctx.rows.image_ids, ()), (1, 1), "nearest")
            assert found is not None, "a reduced scale follows complete ones"
            codes = found[:, 0]
        return ctx.lens_entropy(x, self.method.entropy_of == "guided", codes, self.method.unit)

    def _layer_entropy(self, layer: int, x: Tensor, ctx: ScaleContext) -> tuple[Tensor, Tensor | None]:
        """Of every token [B, N], and the layer's mean [B] if it is not theirs."""
        if self.probe == "previous" or layer + 1 < self.method.probe_from_layer:
            images = Rows(ctx.rows.image_ids, ())
            entropy = self.memory["final"].read(images, ctx.scale.grid, self.method.restore_mode)
            assert entropy is not None, "a reduced scale follows complete ones"
            means = self.memory["mean", layer].read(images, (1, 1), "nearest")
            mean = entropy.double().mean((1, 2)) if means is None else means[:, 0, 0]
            return entropy[..., 0], mean
        return self._lens(layer, x, ctx), None

    def _score(self, layer: int, entropy: Tensor, ctx: ScaleContext) -> Tensor:
        """What the kept tokens have most of, [B, N]."""
        metric, images, grid = self.method.metric, Rows(ctx.rows.image_ids, ()), ctx.scale.grid
        if metric == "random":
            return self.uploads[f"noise {ctx.scale.index + 1}"].expand_as(entropy)
        if metric == "attention":  # attention that is spread over everything looks at nothing
            cached = self.memory["attention", layer].read(images, grid, self.method.restore_mode)
            return entropy if cached is None else -cached[..., 0]
        if metric == "mse":  # how much the layer changed a cell one scale before
            cached = self.memory["moved", layer].read(images, grid, self.method.restore_mode)
            return entropy if cached is None else cached[..., 0]
        return entropy

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
        if not any(self.ratio[scale.index + 1][image] for image in rows.image_ids):
            self.layer_stats = None  # those of an earlier scale
        seen = logits if m.entropy_of == "guided" else raw[: rows.images]
        entropy = ctx.token_entropy(seen, m.unit)
        if self.computed is not None:  # elsewhere the newest that is known still holds
            known = self.memory["final"].read(Rows(rows.image_ids, ()), scale.grid, m.restore_mode)
            entropy = entropy if known is None else torch.where(self.computed, entropy, known[..., 0])
        self.entropy = entropy.double().mean(1)  # [B]
        if not self.records(scale):
            return
        if self.probe == "previous" or m.probe_from_layer == 2:
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
        if self.layer_stats is None:
            return {"entropy": self.entropy}
        return {"entropy": self.entropy, "layers": self.layer_stats.movedim(-1, 0)}

    def on_report(self, ctx: ScaleContext, report: Mapping[str, Numbers]) -> None:
        self.pending.append((ctx.scale, ctx.rows.image_ids, report))
        if "layers" in report:
            self.layer_reports[ctx.scale.index + 1] = (ctx.rows.image_ids, report)

    # For the trace

    def explain(self, image: int) -> Explanation:
        self._read_entropies()
        g = self.growth[image]
        reduced = None if g.star is None or g.star == len(self.context.schedule) else g.star + 1
        decisions = {scale.index + 1: self._decision(image, scale.index + 1) for scale in self.context.schedule}
        return Explanation(Activation(reduced, g.star, g.reason, g.eta), decisions)

    def _decision(self, image: int, t: int) -> Decision:
        g = self.growth[image]
        layer_entropy: tuple[float, ...] = ()
        layer_ratio: tuple[float, ...] = ()
        if t in self.layer_reports and image in self.layer_reports[t][0]:
            images, report = self.layer_reports[t]
            layer_stats = report["layers"]
            layer_entropy, layer_ratio = (tuple(layer_stats[images.index(image), :, n].tolist()) for n in (MEAN, RATIO))
        return Decision(
            entropy=g.entropy.get(t),
            growth=g.growth(t),
            smoothed_growth=g.smoothed(t),
            ratio=self.ratio.get(t, [0.0] * self.context.images)[image],
            layer_entropy=layer_entropy,
            layer_ratio=layer_ratio,
        )
