"""LD-Pruning: tokens stay where the latent changed in detail at the scale before."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nextscale.engine.schedule import Grid, Scale
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import Activation, Explanation, Group, Numbers, PolicyContext, ScaleContext, ScalePlan
from nextscale.methods.restore import CachedPolicy
from nextscale.methods.selection import Selection, for_rows, topk_select

TINY = 1e-12


@dataclass(frozen=True)
class LDPruning(Method):
    """Important: `rho`.

    The paper is read as follows where it leaves something open: the change of the latent is that of the feature map,
    brought to the grid of its scale; the distance of the two branches is a root mean square, so that scales of
    different sizes can be compared. What differs from the paper: a cell that is not computed adds nothing, where the
    paper adds the code of the scale before once more (docs/results.md says why that goes wrong on bits).
    """

    name = "ld_pruning"
    summary = "Keeps the tokens where the latent changed most in detail, and ends guidance once it stops mattering."
    paper = "Where to Refine, When to Stop: Rethinking Redundancy via Latent Discrepancy"

    rho: float = 0.5  # share of the change's energy that the kept tokens hold
    delta: float = 0.15  # guidance ends when the distance of its branches changes by less than that share; 0: never
    scales: int = 3  # the last ones, which are thinned
    skip: int = 0  # of those, the last ones that are left out; the paper's comparison with FastVAR has 2
    watched: int = 4  # the last scales, after each of which guidance may end

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("rho", 0, 1, above=True)
        self.require("delta", 0, 1000)
        for name in ("scales", "skip", "watched"):
            self.require(name, 0, 1000)
        if self.skip > self.scales:
            raise NextscaleError(f"ld_pruning: skip = {self.skip} must not exceed scales = {self.scales}")

    def start(self, context: PolicyContext) -> LDPruningPolicy:
        if self.scales >= len(context.schedule):
            raise NextscaleError(
                f"ld_pruning: scales = {self.scales} leaves no complete scale of a schedule of {len(context.schedule)}"
            )
        return LDPruningPolicy(context, self)


def detail_energy(change: Tensor, grid: Grid, to: Grid) -> Tensor:
    """The energy of a change of maps [B, d, H, W] in the detail bands of Haar's transform on a grid, smoothed, on the
    cells of another one, [B, N]."""
    cells = F.interpolate(change.float(), size=tuple(grid), mode="area")
    odd = [n % 2 for n in grid]
    cells = F.pad(cells, (0, odd[1], 0, odd[0]), mode="replicate")
    # Of each 2 x 2 block: all energy but that of its mean.
    blocks = 4 * F.avg_pool2d(cells.square(), 2) - 4 * F.avg_pool2d(cells, 2).square()
    energy = F.avg_pool2d(blocks.clamp_min(0).sum(1, keepdim=True), 3, stride=1, padding=1)
    return F.interpolate(energy, size=tuple(to), mode="bilinear").flatten(1)


def fewest_with(energy: Tensor, share: float) -> Tensor:
    """How many of the highest energies [B, N] hold this share of them all, [B]."""
    held = energy.sort(1, descending=True).values.double().cumsum(1)
    return (held < share * held[:, -1:]).sum(1).add(1).clamp_max(energy.shape[1])


class LDPruningPolicy(CachedPolicy):
    def __init__(self, context: PolicyContext, method: LDPruning) -> None:
        super().__init__(context, "zero", uncomputed="nothing")
        self.method, scales = method, len(context.schedule)
        self.first, self.stop = scales - method.scales, scales - method.skip
        self.watches_from = scales - method.watched if method.delta else scales
        self.before: Tensor | None = None  # the maps without the newest scale
        self.unguided_from = [scales] * context.images
        self.pending: list[tuple[int, tuple[int, ...], Numbers]] = []
        self.distance: dict[int, float] = {}  # of an image's two branches, at the newest scale that was read
        self.capabilities = dataclasses.replace(
            self.capabilities, reads_features=True, graph_key=("ld_pruning",), warmup_calls=2
        )

    # Between scales

    def plan_scale(self, scale: Scale) -> ScalePlan:
        if scale.index > self.watches_from:
            self._read()
        guided = scale.index < self.context.sampling.guided_until
        return self.plan(
            scale,
            actions=("stop" if scale.index >= self.stop else "run",) * self.context.images,
            guided=tuple(guided and scale.index < at for at in self.unguided_from),
            needs_hidden=self._thins(scale),
            variant=(self._thins(scale), self._watches(scale)),
        )

    def on_features(self, features: Tensor, ctx: ScaleContext) -> None:
        t = ctx.scale.index
        if self.first <= t + 1 < self.stop:
            grids = self.context.schedule.grids
            change = features if self.before is None else features - self.before  # before the first scale they are 0
            energy = detail_energy(change, grids[t], grids[t + 1])
            # Named by their number, for a captured scale reads them where they are.
            self.upload(f"energy {energy.shape[1]}", energy)
            self.upload(f"count {energy.shape[1]}", fewest_with(energy, self.method.rho).double())
        self.before = features if t + 2 >= self.first else None

    def _thins(self, scale: Scale) -> bool:
        return self.first <= scale.index < self.stop

    def _watches(self, scale: Scale) -> bool:
        return scale.index + 1 >= self.watches_from

    def _read(self) -> None:
        """End the guidance of images whose branches keep their distance."""
        for t, images, distances in self.pending:
            for image, new in zip(images, distances.tolist(), strict=True):
                if self.unguided_from[image] <= t:
                    continue
                old = self.distance.get(image)
                steady = old is not None and abs(new - old) < self.method.delta * (old + TINY)
                if self.context.warmup is not None:
                    steady = bool(self.context.warmup)
                if steady and t >= self.watches_from:
                    self.unguided_from[image] = min(self.unguided_from[image], t + 1)
                self.distance[image] = new
        self.pending.clear()

    # Inside a scale, on the device

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        if not self._thins(ctx.scale):
            return None
        if not layer:  # one selection serves all layers
            n, rows = ctx.scale.tokens, ctx.rows
            energy, count = (self.gather_rows(rows, self.uploads[f"{name} {n}"]) for name in ("energy", "count"))
            self.chosen = for_rows(rows, functools.partial(topk_select, energy, count.long()))
        return self.chosen

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        rows = ctx.rows
        if not self._watches(ctx.scale) or not rows.unconditional:
            return
        conditional, unconditional = raw[: rows.images].flatten(1), raw[rows.images :].flatten(1)
        if rows.guided is None:
            self.apart = (conditional - unconditional).square().mean(1).sqrt().double()
        else:  # the others lost their guidance before, and are not asked any more
            guided = rows.guided.to(raw.device)
            apart = (conditional[guided] - unconditional).square().mean(1).sqrt().double()
            self.apart = apart.new_zeros(rows.images).index_copy(0, guided, apart)

    def report(self, ctx: ScaleContext) -> dict[str, Tensor]:
        watches = self._watches(ctx.scale) and ctx.rows.unconditional
        return {"distance": self.apart} if watches else {}

    def on_report(self, ctx: ScaleContext, report: Mapping[str, Numbers]) -> None:
        if "distance" in report:
            self.pending.append((ctx.scale.index, ctx.rows.image_ids, report["distance"]))

    def explain(self, image: int) -> Explanation:
        first = min(self.first, self.unguided_from[image])
        return Explanation(Activation(first + 1 if first < len(self.context.schedule) else None, reason="fixed"))
