"""ToProVAR: attention entropy decides where to start, which layers to thin out and which tokens leave them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nextscale.engine.rows import Rows
from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import (
    Activation,
    Explanation,
    Group,
    Numbers,
    Policy,
    PolicyContext,
    ScaleContext,
    ScalePlan,
)
from nextscale.methods.restore import CachedPolicy
from nextscale.methods.selection import Selection, for_rows, topk_select
from nextscale.methods.token_cache import store_selected


@dataclass(frozen=True)
class ToProVAR(Method):
    """`tau`, `beta` and `a_max` are not published: the defaults are placeholders until a model is calibrated."""

    name = "toprovar"
    summary = "Attention entropy finds the first scale to reduce, the layers that can be thinned, and the tokens."
    paper = "ToProVAR: Efficient Visual Autoregressive Modeling via Tri-Dimensional Entropy-Aware Semantic Analysis"

    tau: float = 0.5  # the share of low-entropy tokens at which the reduction starts
    beta: float = 1.0  # how fast a dominant singular value makes a layer "global", which keeps its tokens
    a_min: float = 0.0  # share dropped at a pruning tendency of 0 ...
    a_max: float = 0.7  # ... and of 1; what exceeds 1 is clipped
    representative: float = 6 / 13  # the scale, as a share of the schedule, at which layers are told apart
    center: bool = True  # subtract the mean of a map before its singular values are taken
    entropy_from: str = "previous_scale"  # or "previous_layer"
    scale_stage: bool = True  # False: start right after the representative scale
    layer_stage: bool = True  # False: all layers alike
    token_stage: bool = True  # False: tokens of a layer leave in a fixed random order
    rank: str = "layer"  # every layer ranks the cells by its own map; "scale": all by the mean of their maps
    required: float = 0.5  # share of the layers that must compute a cell
    uncomputed: str = "auto"  # other cells add "nothing" (auto: where codes are bits), or are sampled all the same
    restore_mode: str = "bilinear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("tau", 0, 1)
        self.require("beta", 0, 1000)
        self.require("a_min", 0, 1)
        self.require("a_max", 0, 1000)
        self.require("representative", 0, 1, above=True)
        self.require_one_of("entropy_from", ("previous_scale", "previous_layer"))
        self.require_one_of("restore_mode", ("nearest", "area", "bilinear", "bicubic"))
        self.require_one_of("rank", ("layer", "scale"))
        self.require("required", 0, 1)
        self.require_one_of("uncomputed", ("auto", "sample", "nothing"))
        if self.a_min > self.a_max:
            raise NextscaleError(f"toprovar: a_min = {self.a_min} must not exceed a_max = {self.a_max}")

    def start(self, context: PolicyContext) -> Policy:
        return ToProVARPolicy(context, self)


class ToProVARPolicy(CachedPolicy):
    def __init__(self, context: PolicyContext, method: ToProVAR) -> None:
        self.landmark = max(round(method.representative * len(context.schedule)), 2) - 1  # index of that scale
        super().__init__(context, "residual", method.restore_mode, self.landmark, method.uncomputed, method.required)
        self.method = method
        self.may_keep_nothing = True
        self.dominance: dict[int, Tensor] = {}  # per image [depth]: first over second singular value of the map
        self.depth_scale: list[int | None] = [None] * context.images  # D, from 1
        self.pending: list[tuple[Scale, tuple[int, ...], Mapping[str, Numbers]]] = []
        self.rho: dict[tuple[int, int], float] = {}  # image, scale
        # The other fields decide which images are active, and what is uploaded of layers.
        key = method.without("tau", "scale_stage", "center")
        self.capabilities = dataclasses.replace(self.capabilities, graph_key=key, warmup_calls=2)

    # Between scales, on the host

    def plan_scale(self, scale: Scale) -> ScalePlan:
        if scale.index > self.landmark:  # before, nothing depends on them, and the device need not be waited for
            self._read()
        needs = frozenset({"attention_entropy"}) if scale.index < len(self.context.schedule) - 1 else frozenset()
        active = tuple(self._active(image, scale) for image in range(self.context.images))
        if not any(active):
            return self.plan(scale, needs=needs)
        self.upload("active", [float(a) for a in active])
        if not self.method.token_stage:
            n = scale.tokens
            order = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float32)
            self.upload(f"order {n}", order.double())
        return self.plan(scale, needs=needs, variant="reduced")

    def _read(self) -> None:
        for scale, images, report in self.pending:
            for image, value in zip(images, report["rho"].tolist(), strict=True):
                self.rho[image, scale.index + 1] = value
                # On the first grids it says nothing: of 2 x 2 cells a quarter or a half lies below the mean.
                known = scale.index >= self.landmark
                if known and self.depth_scale[image] is None and value >= self.method.tau:
                    self.depth_scale[image] = scale.index + 1
        self.pending.clear()

    def _first(self, image: int) -> int | None:
        """The first reduced scale, from 1: after D, and after layers were told apart."""
        if self.context.warmup is not None:
            return self.landmark + 2 if self.context.warmup else None
        if not self.method.scale_stage:
            return self.landmark + 2
        d = self.depth_scale[image]
        return None if d is None else max(d, self.landmark + 1) + 1

    def _active(self, image: int, scale: Scale) -> bool:
        first = self._first(image)
        return first is not None and scale.index + 1 >= first and image in self.dominance

    # Inside a scale, on the device

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        rows, scale = ctx.rows, ctx.scale
        if not any(self._active(image, scale) for image in rows.image_ids):
            return None
        m, n = self.method, scale.tokens
        tendency = self._entropy(layer, ctx)
        tendency = tendency / tendency.mean(1, keepdim=True)
        if m.rank == "scale" and not layer:
            maps = [self._entropy(each, ctx) for each in range(self.context.depth)]
            self.scale_order = -torch.stack([map_ / map_.mean(1, keepdim=True) for map_ in maps]).mean(0)
        if not m.token_stage:
            tendency = torch.ones_like(tendency)
        if m.layer_stage:
            dominance = self.gather_rows(rows, self.uploads["dominance"])[:, layer].to(x.dtype)
            # Eq. 4: 1 = a detail layer, which is thinned; 0 = a global one, whose map has one dominant direction.
            tendency = tendency * torch.exp(-m.beta * (dominance - 1))[:, None]
        tendency = tendency * ((scale.index + 1) / len(self.context.schedule))
        keep = 1 - (m.a_min + (m.a_max - m.a_min) * tendency).clamp(0, 1)
        count = keep.double().sum(1).round().long().clamp(0, n)
        count = torch.where(self.gather_rows(rows, self.uploads["active"]) > 0, count, n)
        order = -tendency if m.rank == "layer" else self.scale_order
        order = order if m.token_stage else self.uploads[f"order {n}"].expand_as(tendency)
        return for_rows(rows, functools.partial(topk_select, order, count))

    def _entropy(self, layer: int, ctx: ScaleContext) -> Tensor:
        """Attention entropy of every token, [B, N], as far as it is known before the layer has run."""
        images, grid = Rows(ctx.rows.image_ids, ()), ctx.scale.grid
        source = layer
        if self.method.entropy_from == "previous_layer" and layer > 0:
            source = layer - 1
            if len(ctx.attention_entropy) == layer:  # of this very scale; the last scale has only the one before
                self._store(source, ctx)
        found = self.memory["entropy", source].read(images, grid, self.method.restore_mode)
        assert found is not None, "a reduced scale follows complete ones"
        return found[..., 0]

    def _store(self, layer: int, ctx: ScaleContext) -> None:
        entropy = ctx.attention_entropy[layer][..., None]
        chosen = ctx.chosen[layer]["self"]
        own = None if chosen is None else chosen.first(len(entropy))
        images = Rows(ctx.rows.image_ids, ())
        store_selected(self.memory["entropy", layer], images, ctx.scale.grid, own, entropy, self.method.restore_mode)

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        if not ctx.attention_entropy:
            return
        images, scale = Rows(ctx.rows.image_ids, ()), ctx.scale
        for layer in range(self.context.depth):
            self._store(layer, ctx)
        maps = [
            cache.read(images, scale.grid, "nearest")
            for cache in (self.memory["entropy", layer] for layer in range(self.context.depth))
        ]
        stacked = torch.stack([m[..., 0] for m in maps if m is not None])  # [depth, B, N]
        mean = stacked.mean(0)
        self.low = (mean < mean.mean(1, keepdim=True)).double().mean(1)
        self.stacked = stacked.transpose(0, 1).unflatten(2, scale.grid)  # [B, depth, h, w]

    def report(self, ctx: ScaleContext) -> dict[str, Tensor]:
        report = {}
        if ctx.attention_entropy:
            report["rho"] = self.low
            if ctx.scale.index == self.landmark:
                report["maps"] = self.stacked
        return report

    def on_report(self, ctx: ScaleContext, report: Mapping[str, Numbers]) -> None:
        if "rho" in report:
            self.pending.append((ctx.scale, ctx.rows.image_ids, report))
        if "maps" in report:  # singular values wait for the device, so they cannot be found inside a scale
            found = self._dominance(torch.as_tensor(report["maps"]))
            self.dominance.update(dict(zip(ctx.rows.image_ids, found, strict=True)))
            ones = torch.ones_like(found[0])
            self.upload("dominance", torch.stack([self.dominance.get(i, ones) for i in range(self.context.images)]))

    def _dominance(self, maps: Tensor) -> Tensor:
        """Maps [B, depth, h, w] -> first over second singular value, [B, depth]."""
        if self.method.center:
            maps = maps - maps.mean((-1, -2), keepdim=True)
        values = torch.linalg.svdvals(maps.float())
        first, second = values[..., 0], values[..., 1] if values.shape[-1] > 1 else torch.zeros_like(values[..., 0])
        return first / second.clamp_min(1e-12)

    # For the trace

    def explain(self, image: int) -> Explanation:
        self._read()
        first, d = self._first(image), self.depth_scale[image]
        if first is None or first > len(self.context.schedule):
            return Explanation(Activation(None, d, "never"))
        return Explanation(Activation(first, d, "inflection" if self.method.scale_stage else "fixed"))
