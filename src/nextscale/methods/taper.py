"""Taper, a method of ours: cheap scales whole, the uncertain cells of the next ones, fewer at each, then nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.engine.rows import Rows
from nextscale.engine.schedule import Grid, Scale, Schedule
from nextscale.engine.trace import Costs
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import (
    Activation,
    Decision,
    Explanation,
    Group,
    PolicyContext,
    ScaleContext,
    ScalePlan,
)
from nextscale.methods.restore import CachedPolicy
from nextscale.methods.selection import Selection, for_rows, topk_select
from nextscale.methods.token_cache import resize_tokens
from nextscale.methods.typical_entropies import TypicalEntropies

# The share of cells that is kept falls by SLOPE from one scale to the next, and twice as fast where it is above KNEE,
# for that much of a cheaper scale is worth completing.
SLOPE, KNEE = 0.3, 0.7
WHOLE = KNEE / SLOPE + (1 - KNEE) / (2 * SLOPE)  # scales before the end of the taper, everything is kept
LEAST = 0.12  # a smaller share is not worth a scale
MOST_UNGUIDED = 0.9  # of the very last scale: rather than more of it, its guidance
CAP = 1.5  # times the budget that no image exceeds
HALVINGS = 40
MODE = "bilinear"  # how a map is enlarged
BUDGET = 0.25


@dataclass(frozen=True)
class Taper(Method):
    """Important: `budget`.

    The cells of a scale are ranked by the entropy of the scale before, the highest of a cell and its neighbors. Cells
    that are not computed add nothing. With `entropies` of the model at hand an image keeps the cells that are among
    the most uncertain of all images, so that it spends what it needs, and the budget is met in the mean; without, or
    with `hard`, every image keeps as many.
    """

    name = "taper"
    summary = "Runs cheap scales whole, of the next ones the uncertain cells, fewer at each, and leaves out the rest."

    budget: float | None = None  # share of the plain run's FLOPs to spend in the mean; a quarter if nothing is set
    quality: float | None = None  # instead of it: the mean SSIM to the plain image that is expected
    hard: bool = False  # no image may spend more than the budget
    entropies: str = ""  # typical ones of the model, by name or as a file of `nextscale calibrate taper`
    unguided: bool = True  # the very last scale runs without guidance, which pays for twice the cells

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None:
            self.require("budget", 0, 1, above=True)
        if self.quality is not None:
            self.require("quality", 0, 1, above=True, below=True)
        if self.budget is not None and self.quality is not None:
            raise NextscaleError("taper: budget and quality are two ways to ask for the same; set one of them")
        if self.quality is not None and not self.entropies:
            raise NextscaleError("taper: what a quality costs is known with `entropies` only; set a budget instead")
        if self.entropies:
            TypicalEntropies.read(self.entropies)

    def start(self, context: PolicyContext) -> TaperPolicy:
        return TaperPolicy(context, self)


@dataclass(frozen=True)
class Price:
    """What shares of the scales cost, as a share of the plain run."""

    costs: Costs
    schedule: Schedule
    rows: tuple[int, ...]  # of every scale, in the plain run
    unguided: bool

    def __call__(self, shares: Sequence[float]) -> float:
        last = len(shares) - 1
        mine = [1 if self.unguided and 0 < share < 1 and t == last else self.rows[t] for t, share in enumerate(shares)]
        return self._flops(shares, mine) / self._flops([1.0] * len(shares), self.rows)

    @property
    def least(self) -> float:
        """The first scale alone: which of its cells are uncertain nobody knows, so it is always complete."""
        return self([1.0] + [0.0] * (len(self.rows) - 1))

    def _flops(self, shares: Sequence[float], rows: Sequence[int]) -> float:
        """As the trace counts them, but for the few keys that cross-attention sees of a text."""
        c, total, keys = self.costs, 0.0, 0.0
        for scale, share, copies in zip(self.schedule, shares, rows, strict=True):
            if share:
                tokens = share * scale.tokens + (0 if scale.index else c.context)
                keys += tokens
                layer = sum(tokens * (c.per_token[p] + c.per_key[p] * keys * (p != "cross")) for p in c.parts)
                total += copies * (c.depth * layer + scale.tokens * c.head)
        return total


def kept_share(distance: float) -> float:
    """Of a scale that lies so many scales before the one at which nothing would be left."""
    return min(max(SLOPE * distance, KNEE + 2 * SLOPE * (distance - KNEE / SLOPE), 0.0), 1.0)


def plan_shares(budget: float, price: Price) -> tuple[list[float], bool]:
    """The share of cells to keep of every scale, so that all cost what the budget has; and whether the very last scale
    is to run without guidance."""
    scales = len(price.rows)
    if budget < price.least:
        raise NextscaleError(
            f"taper: a budget of {budget:g} does not pay for the first scale; the least is {price.least:.3g}"
        )

    def shares(end: float, last: int) -> list[float]:
        return [1.0, *(kept_share(end - t) if t <= last else 0.0 for t in range(1, scales))]

    for last in range(scales - 1, -1, -1):  # as many scales as are worth it
        low = last + LEAST / SLOPE
        if price(shares(low, last)) > budget:
            continue
        high = last + WHOLE
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if price(shares(middle, last)) <= budget else (low, middle)
        found = [1.0] * scales if budget >= 1 else shares(low, last)
        if price.unguided and found[-1] > MOST_UNGUIDED:
            return plan_shares(budget, dataclasses.replace(price, unguided=False))
        return found, price.unguided
    raise AssertionError("the first scale alone can be paid")


def uncertainty(entropy: Tensor, grid: Grid, to: Grid) -> Tensor:
    """How uncertain the cells of a scale are, from the entropies [B, N] of the scale before."""
    return highest_nearby(resize_tokens(entropy[..., None], grid, to, MODE)[..., 0], to)


def highest_nearby(entropy: Tensor, grid: Grid) -> Tensor:
    """Of every cell and its neighbors."""
    return F.max_pool2d(entropy.unflatten(1, grid), 3, stride=1, padding=1).flatten(1)


class TaperPolicy(CachedPolicy):
    def __init__(self, context: PolicyContext, method: Taper) -> None:
        super().__init__(context, "zero", uncomputed="nothing", required=1.0)
        self.method, scales = method, len(context.schedule)
        assert context.costs is not None
        guided = context.sampling.guided_until
        rows = tuple(2 if t < guided else 1 for t in range(scales))
        price = Price(context.costs, context.schedule, rows, method.unguided and rows[-1] == 2)
        typical = TypicalEntropies.read(method.entropies) if method.entropies else None
        budget = BUDGET if method.budget is None else method.budget
        if typical is not None and method.quality is not None:
            budget = typical.budget_of(method.quality)
        self.adapts = typical is not None and not method.hard and budget < 1
        asked = budget
        if self.adapts and typical is not None and budget >= price.least:
            asked = min(max(typical.asked_for(budget), price.least), CAP * budget, 1.0)
        self.budget = budget
        self.shares, self.unguided = plan_shares(asked, price)
        most, _ = plan_shares(min(CAP * budget, 1), dataclasses.replace(price, unguided=self.unguided))
        self.thresholds = [-1.0] * scales
        self.most = self.shares
        if self.adapts and typical is not None:
            at = [(t + 1) / scales for t in range(scales)]
            self.thresholds = [typical.threshold(a, s) for a, s in zip(at, self.shares, strict=True)]
            self.most = [max(a, b) for a, b in zip(most, self.shares, strict=True)]
        self.first = next((t for t, share in enumerate(self.shares) if share < 1), scales)  # to be thinned
        self.last = max(t for t, share in enumerate(self.shares) if share)
        tokens = [scale.tokens for scale in context.schedule]
        reserved = sum(round(n * s) for n, s in zip(tokens, self.most, strict=True))
        self.capabilities = dataclasses.replace(
            self.capabilities,
            kv_tokens=0 if self.adapts else reserved,
            graph_key=("taper", self.adapts),
        )

    def records(self, scale: Scale) -> bool:
        """Whether the next scale ranks its cells by this one."""
        return self.first - 1 <= scale.index < self.last

    def thins(self, scale: Scale) -> bool:
        return self.first <= scale.index <= self.last

    def plan_scale(self, scale: Scale) -> ScalePlan:
        t, images = scale.index, self.context.images
        if t > self.last:
            return self.plan(scale, actions=("stop",) * images)
        thins = self.thins(scale)
        if thins:
            self.upload("plan", [self.thresholds[t], float(round(self.most[t] * scale.tokens))])
        plan = self.plan(scale, needs_hidden=thins, variant=(thins, self.records(scale)))
        alone = self.unguided and thins and t == len(self.context.schedule) - 1
        return plan._replace(guided=(False,) * images) if alone else plan

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        if not self.thins(ctx.scale):
            return None
        if not layer:  # one selection serves all layers
            score = self._score(ctx)
            threshold, most = self.uploads["plan"]
            count = most.expand(len(score))
            if self.adapts:
                count = torch.minimum((score > threshold).double().sum(1), count)
            self.chosen = for_rows(ctx.rows, functools.partial(topk_select, score, count.long()))
        return self.chosen

    def _score(self, ctx: ScaleContext) -> Tensor:
        """The newest entropy of every cell or of a neighbor, whichever is higher, [B, N]."""
        found = self.memory["entropy"].read(Rows(ctx.rows.image_ids, ()), ctx.scale.grid, MODE)
        assert found is not None, "a thinned scale follows a complete one"
        return highest_nearby(found[..., 0], ctx.scale.grid)

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        if not self.records(ctx.scale):
            return
        images, grid = Rows(ctx.rows.image_ids, ()), ctx.scale.grid
        entropy = ctx.token_entropy(raw[: ctx.rows.images], "token")
        if self.computed is not None:  # elsewhere the newest that is known still holds
            known = self.memory["entropy"].read(images, grid, MODE)
            entropy = entropy if known is None else torch.where(self.computed, entropy, known[..., 0])
        self.memory["entropy"].store(images, grid, entropy[..., None])

    def explain(self, image: int) -> Explanation:
        if self.first == len(self.shares):
            return Explanation()
        shown = [threshold if threshold >= 0 else None for threshold in self.thresholds]
        planned = {
            t: Decision(share=share, threshold=threshold if 0 < share < 1 else None)
            for t, (share, threshold) in enumerate(zip(self.shares, shown, strict=True), start=1)
        }
        return Explanation(Activation(self.first + 1, reason="budget"), planned, self.budget)
