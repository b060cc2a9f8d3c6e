"""Write a method of your own and compare it with the plain run; docs/add-a-method.md explains every step."""

import os
from dataclasses import dataclass

import torch

from nextscale import Pipeline
from nextscale.methods.base import Method
from nextscale.methods.restore import CachedPolicy
from nextscale.methods.selection import topk_select


@dataclass(frozen=True)
class KeepEdges(Method):
    name, summary = "keep_edges", "Keeps the tokens that differ most from their neighborhood."
    share: float = 0.5  # of the tokens that stay at the last two scales

    def start(self, context):
        return KeepEdgesPolicy(context, self)


class KeepEdgesPolicy(CachedPolicy):  # a token that is left out gets what its layer added one scale before
    def __init__(self, context, method):
        self.share, self.first = method.share, len(context.schedule) - 2
        super().__init__(context, after=self.first - 1)

    def select(self, layer, group, x, ctx):  # x [rows, tokens, channels]
        if ctx.scale.index < self.first:
            return None  # all tokens
        maps = x.transpose(1, 2).unflatten(2, ctx.scale.grid)
        score = (maps - torch.nn.functional.avg_pool2d(maps, 3, 1, 1)).square().sum(1).flatten(1)
        return topk_select(score, torch.full((len(x),), round(self.share * ctx.scale.tokens)))


pipe = Pipeline.from_pretrained()
out = pipe("a penguin in the snow", seed=1, method=KeepEdges(), pixel_budget=os.environ.get("PIXEL_BUDGET"))
out.images[0].save("edges.png")
print(out.trace.summary())
