"""NOVA: entropy decides when to start dropping tokens, how many per scale and layer, and a cache fills the holes."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.engine.state import Rows
from nextscale.errors import NextscaleError
from nextscale.methods.base import (
    Activation,
    Decision,
    Group,
    Method,
    Numbers,
    Policy,
    PolicyContext,
    ScaleContext,
    ScalePlan,
)
from nextscale.methods.nova.growth import Growth
from nextscale.methods.nova.layer_linkage import MEAN, MOST, RATIO, Linkage
from nextscale.methods.restore import CachedPolicy
from nextscale.methods.selection import Selection, for_rows
from nextscale.methods.tables import read_table, relative_ratio
from nextscale.methods.token_cache import store_chosen

LENS_CODES = 256  # of a large codebook, `lens_topk` looks at the codes that were likeliest one scale before


@dataclass(frozen=True)
class NOVA(Method):
    """Important: `alpha` (when to start) and `tau` (how steeply the ratio rises from scale to scale).

    The rest either is the paper's setting or replaces a part of the method, for its ablations.
    """

    name = "nova"
    summary = "Entropy growth starts the reduction, entropy picks the tokens, a residual cache fills the holes."
    paper = "Adaptive Visual Autoregressive Acceleration via Dual-Linkage Entropy Analysis"

    t_est: int = 5  # scales that are never reduced; their growth is the baseline
    alpha: float = 0.5  # share of the baseline growth at which the reduction starts
    tau: float = 0.8  # scales over which the ratio rises
    lam: float = 0.1  # how much a growing entropy lowers the ratio
    scale_linkage: bool = True  # False: the ratio of a scale comes from `scale_table`
    scale_table: str = "fastvar"  # a name, or a file of `nextscale calibrate shares`
    layer_linkage: bool = True  # False: every layer has the scale's ratio
    metric: str = "entropy"  # which tokens stay: entropy | attention | mse | random
    cache: str = "residual"  # what fills the holes: residual | feature | zero
    uncomputed: str = (
        "sample"  # cells that some layer left out are sampled like all others, or add "nothing" to the map
    )
    restore_mode: str = "bilinear"  # how a cached map is enlarged: nearest | area | bilinear | bicubic
    probe: str = "auto"  # a layer's entropy: lens | lens_topk | previous; auto = lens for bits, else lens_topk
    probe_from_layer: int = (
        1  # 2: the first layer, which sees bare embeddings, uses `previous` and stays out of the mean
    )
    unit: str = "token"  # entropy of a token of bits: their sum, or "bit": their mean
    entropy_of: str = "conditional"  # or "guided": after temperature and guidance
    max_layer_keep: float = 1.0  # the largest share of tokens that a reduced layer keeps
    allow_empty: bool = False  # a layer may keep no token at all

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("t_est", 2, 1000)
        self.require("alpha", 0, 10)
        self.require("tau", 0, 100, above=True)
        self.require("lam", 0, 10)
        self.require("max_layer_keep", 0, 1, above=True)
        self.require_one_of("metric", ("entropy", "attention", "mse", "random"))
        self.require_one_of("cache", ("residual", "feature", "zero"))
        self.require_one_of("uncomputed", ("sample", "nothing"))
        self.require_one_of("restore_mode", ("nearest", "area", "bilinear", "bicubic"))
        self.require_one_of("probe", ("auto", "lens", "lens_topk", "previous"))
        self.require_one_of("probe_from_layer", (1, 2))
        self.require_one_of("unit", ("token", "bit"))
        self.require_one_of("entropy_of", ("conditional", "guided"))
        read_table(self.scale_table)

    def start(self, context: PolicyContext) -> Policy:
        if len(context.schedule) < self.t_est + 2:
            raise NextscaleError(
                f"nova: t_est = {self.t_est} needs a schedule of at least {self.t_est + 2} scales, "
                f"this one has {len(context.schedule)}"
            )
        return NOVAPolicy(context, self)


class NOVAPolicy(CachedPolicy):
    capturable = True

    def __init__(self, context: PolicyContext, method: NOVA) -> None:
        super().__init__(context, method.cache, method.restore_mode, method.t_est, method.uncomputed)
        self.method = method
        self.table = read_table(method.scale_table)
        self.growth = [Growth(method.t_est, method.alpha) for _ in range(context.images)]
        # Its memory, besides what layers added: the entropy of the final prediction ("final") and of layers ("mean"),
        # for the probe "previous"; likely codes ("codes"), for "lens_topk"; attention entropy ("attention") and how
        # much each layer changed a cell ("moved"), for the metrics of these names.
        self.pending: list[tuple[Scale, tuple[int, ...], Mapping[str, Numbers]]] = []  # not read yet
        self.ratio: dict[int, list[float]] = {}  # per scale, per image
        self.noted: dict[int, tuple[tuple[int, ...], Mapping[str, Numbers]]] = {}  # per scale, what layers reported
        self.notes: Tensor | None = None  # of the layers of a reduced scale, [layers, 4, B]: see `Linkage`
        self.linkage = Linkage(
            method.layer_linkage,
            method.probe_from_layer - 1,
            min(1 - method.max_layer_keep, MOST),
            method.allow_empty,
        )
        self.rehearsed: list[int | None] = []  # t* of every image, if it has been decided beforehand
        self.probe = method.probe
        if self.probe == "auto":
            self.probe = "lens" if context.bits else "lens_topk"
        # Whether complete layers leave something behind.
        self.learns = method.cache != "zero" or self.probe == "previous" or method.metric == "mse"
        # What a layer sees then does not depend on the layer: one selection serves the whole scale.
        self.once = self.probe == "previous" and not method.layer_linkage and method.metric in ("entropy", "random")

    @property
    def structure(self) -> Hashable:
        """The others make the ratios, which are told."""
        return self.method.without("alpha", "tau", "lam", "scale_linkage", "scale_table")

    # Between scales, on the host

    def plan_scale(self, scale: Scale) -> ScalePlan:
        t = scale.index + 1
        if t > self.method.t_est:  # before, nothing depends on them, and the device need not be waited for
            self._read_entropies()
        self.ratio[t] = [self._ratio(g, t) for g in self.growth]
        if self.rehearsed:
            self.ratio[t] = [0.0 if star is None or t <= star else 0.5 for star in self.rehearsed]
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
        needs_hidden = some or (self.learns and self.records(scale))
        return self.plan(scale, needs=needs, needs_hidden=needs_hidden, variant=(some, everyone))

    @property
    def rehearsals(self) -> int:
        return len(self._rehearsals)

    def rehearse(self, number: int) -> None:
        self.rehearsed = self._rehearsals[number]

    @property
    def _rehearsals(self) -> list[list[int | None]]:
        first, images = self.method.t_est + 1, self.context.images  # what it fills holes from comes behind t_est
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
            newest = growth.newest(t) or 0.0  # the growth of scale t itself is not known yet
            ratio = 1 / (1 + math.exp(-(t - (growth.star + 1)) / m.tau)) - m.lam * math.tanh(newest)
        else:
            ratio = relative_ratio(self.table, t / len(self.context.schedule))
        return min(max(ratio, 0.0), MOST)

    # Inside a scale, on the device

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        t, rows = ctx.scale.index + 1, ctx.rows
        ratios = [self.ratio[t][image] for image in rows.which]
        if not layer:
            self.chosen: Selection | None = None  # the newest of this scale
            self.notes = None
            if any(ratios):
                self.notes = torch.empty(self.context.depth, 4, rows.images, dtype=torch.float64, device=x.device)
        if self.probe == "previous" and self.method.layer_linkage and self.records(ctx.scale) and not all(ratios):
            # A complete scale is the only chance to learn the layers' entropies of an image.
            images = Rows(rows.which, ())
            mean = self._lens(layer, x, ctx).double().mean(1)[:, None, None]
            known = self.memory["mean", layer].read(images, (1, 1), "nearest")
            if known is not None:
                mean = torch.where(self.gather_rows(rows, self.scale_ratio)[:, None, None] > 0, known, mean)
            self.memory["mean", layer].store(images, (1, 1), mean)
        if self.notes is None:
            return None
        if self.once and self.chosen is not None:
            self.notes[layer] = self.notes[0]
            return self.chosen
        entropy, known_mean = self._layer_entropy(layer, x, ctx)
        score, ratio = self._score(layer, entropy, ctx), self.gather_rows(rows, self.scale_ratio)
        keep = functools.partial(self.linkage.keep, entropy, score, ratio, self.notes, layer, mean=known_mean)
        self.chosen = for_rows(rows, keep)
        return self.chosen

    def _lens(self, layer: int, x: Tensor, ctx: ScaleContext) -> Tensor:
        """Entropy [B, N] of the prediction that the model's own head would make here."""
        codes = None
        if self.probe == "lens_topk":
            found = self.memory["codes"].read(Rows(ctx.rows.which, ()), (1, 1), "nearest")
            assert found is not None, "a reduced scale follows complete ones"
            codes = found[:, 0]
        return ctx.lens_entropy(x, self.method.entropy_of == "guided", codes, self.method.unit)

    def _layer_entropy(self, layer: int, x: Tensor, ctx: ScaleContext) -> tuple[Tensor, Tensor | None]:
        """Of every token [B, N], and the layer's mean [B] if it is not theirs."""
        if self.probe == "previous" or layer + 1 < self.method.probe_from_layer:
            images = Rows(ctx.rows.which, ())
            entropy = self.memory["final"].read(images, ctx.scale.grid, self.method.restore_mode)
            assert entropy is not None, "a reduced scale follows complete ones"
            means = self.memory["mean", layer].read(images, (1, 1), "nearest")
            mean = entropy.double().mean((1, 2)) if means is None else means[:, 0, 0]
            return entropy[..., 0], mean
        return self._lens(layer, x, ctx), None

    def _score(self, layer: int, entropy: Tensor, ctx: ScaleContext) -> Tensor:
        """What the kept tokens have most of, [B, N]."""
        metric, images, grid = self.method.metric, Rows(ctx.rows.which, ()), ctx.scale.grid
        if metric == "random":
            return self.uploads[f"noise {ctx.scale.index + 1}"].expand_as(entropy)
        if metric == "attention":  # attention that is spread over everything looks at nothing
            cached = self.memory["attention", layer].read(images, grid, self.method.restore_mode)
            return entropy if cached is None else -cached[..., 0]
        if metric == "mse":  # how much the layer changed a cell one scale before
            cached = self.memory["moved", layer].read(images, grid, self.method.restore_mode)
            return entropy if cached is None else cached[..., 0]
        return entropy

    @property
    def fills_plainly(self) -> bool:
        return self.method.metric != "mse"

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        filled = super().restore(layer, group, x, chosen, y, ctx)
        if self.method.metric == "mse" and self.records(ctx.scale):
            images = ctx.rows.images
            change = (filled[:images] - x[:images]).square().mean(-1, keepdim=True)
            self.memory["moved", layer].store(Rows(ctx.rows.which, ()), ctx.scale.grid, change)
        return filled

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        m, rows, scale = self.method, ctx.rows, ctx.scale
        if not any(self.ratio[scale.index + 1][image] for image in rows.which):
            self.notes = None  # those of an earlier scale
        seen = logits if m.entropy_of == "guided" else raw[: rows.images]
        entropy = ctx.token_entropy(seen, m.unit)
        if self.computed is not None:  # elsewhere the newest that is known still holds
            known = self.memory["final"].read(Rows(rows.which, ()), scale.grid, m.restore_mode)
            entropy = entropy if known is None else torch.where(self.computed, entropy, known[..., 0])
        self.entropy = entropy.double().mean(1)  # [B]
        if not self.records(scale):
            return
        if self.probe == "previous" or m.probe_from_layer == 2:
            self.memory["final"].store(Rows(rows.which, ()), scale.grid, entropy[..., None])
        if self.probe == "lens_topk":
            likely = seen.softmax(-1).mean(1)
            codes = likely.topk(min(LENS_CODES, likely.shape[-1]), dim=-1).indices
            self.memory["codes"].store(Rows(rows.which, ()), (1, 1), codes[:, None])
        for layer, map_ in enumerate(ctx.attention_entropy):
            self._store_attention(layer, map_[: rows.images], ctx)

    def _store_attention(self, layer: int, entropy: Tensor, ctx: ScaleContext) -> None:
        chosen = ctx.chosen[layer]["self"]
        own = None if chosen is None else chosen.first(len(entropy))
        images = Rows(ctx.rows.which, ())
        cache = self.memory["attention", layer]
        store_chosen(cache, images, ctx.scale.grid, own, entropy[..., None], self.restore_mode)

    def report(self, ctx: ScaleContext) -> dict[str, Tensor]:
        if self.notes is None:
            return {"entropy": self.entropy}
        return {"entropy": self.entropy, "layers": self.notes.movedim(-1, 0)}

    def on_report(self, ctx: ScaleContext, report: Mapping[str, Numbers]) -> None:
        self.pending.append((ctx.scale, ctx.rows.which, report))
        if "layers" in report:
            self.noted[ctx.scale.index + 1] = (ctx.rows.which, report)

    def conclude(self) -> None:
        self._read_entropies()

    # For the trace

    def activation(self, image: int) -> Activation:
        g = self.growth[image]
        last = len(self.context.schedule)
        reduced = None if g.star is None or g.star == last else g.star + 1
        return Activation(reduced, g.star, g.reason, g.eta)

    def decision(self, image: int, scale: Scale) -> Decision:
        t, g = scale.index + 1, self.growth[image]
        layer_entropy: tuple[float, ...] = ()
        layer_ratio: tuple[float, ...] = ()
        if t in self.noted and image in self.noted[t][0]:
            images, report = self.noted[t]
            notes = report["layers"]
            layer_entropy, layer_ratio = (tuple(notes[images.index(image), :, n].tolist()) for n in (MEAN, RATIO))
        return Decision(
            entropy=g.entropy.get(t),
            growth=g.growth(t),
            smoothed_growth=g.smoothed(t),
            ratio=self.ratio.get(t, [0.0] * self.context.images)[image],
            layer_entropy=layer_entropy,
            layer_ratio=layer_ratio,
        )
