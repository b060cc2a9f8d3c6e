"""A control: as many tokens as another method keeps, but any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nextscale.methods.base import Context, Group, Method, Policy, Stats
from nextscale.methods.nova import NOVA
from nextscale.methods.selection import Selection, keep_highest


@dataclass(frozen=True)
class RandomSelection(Method):
    """Everything is the other method's, except which tokens stay."""

    name = "random_selection"
    summary = "Keeps as many tokens as another method does, chosen at random."

    like: Method = field(default_factory=NOVA)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("seed", 0, 2**31)

    def start(self, context: Context) -> Policy:
        policy = self.like.begin(context)
        inner = policy.select

        def select(layer: int, group: Group, x: Tensor, stats: Stats) -> Selection | None:
            chosen = inner(layer, group, x, stats)
            if chosen is None:
                return None
            # The same order for every image and row: a batch draws what single runs draw.
            key = f"{self.seed}/{stats.scale.index}/{layer}/{group}".encode()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little") % (2**31 - 1))
            noise = torch.rand(stats.scale.tokens, generator=generator, dtype=torch.float32).to(x.device)
            return keep_highest(noise.expand(len(x), -1), chosen.count, chosen.index.shape[1])

        policy.select = select  # type: ignore[method-assign]
        policy.capturable = False
        return policy

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "fields": {"like": self.like.to_dict(), "seed": self.seed}}
