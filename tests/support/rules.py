"""A method whose rules are fixed, for tests; and the check that a batch of ragged rows equals single runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.pipelines import ask

from nextscale.methods.base import Method
from nextscale.methods.policy import Capabilities, Policy, PolicyContext, ScalePlan
from nextscale.methods.selection import Selection


@dataclass(frozen=True)
class Rules(Method):
    """Fixed actions, guidance and a ragged random selection, different for every image."""

    name = "rules"
    summary = "For tests."
    keep: bool = False
    skip: tuple[tuple[int, int], ...] = ()  # (image, scale)
    stop: tuple[tuple[int, int], ...] = ()
    unguided: tuple[tuple[int, int], ...] = ()  # from this scale on
    offset: int = 0  # the image that this call's first one is in the batch it is compared with

    def start(self, context: PolicyContext) -> Policy:
        return RulesPolicy(context, self)


class RulesPolicy(Policy):
    capabilities = Capabilities(kv_tokens=0)

    def __init__(self, context: PolicyContext, rules: Rules) -> None:
        super().__init__(context)
        self.rules = rules

    def plan_scale(self, scale) -> ScalePlan:
        plan = super().plan_scale(scale)
        self.scale = scale
        r, actions = self.rules, []
        for image in range(self.context.images):
            me = image + r.offset
            stopped = any(i == me and scale.index >= s for i, s in r.stop)
            actions.append("stop" if stopped else "skip" if (me, scale.index) in r.skip else "run")
        guided = [
            g and not any(i == image + r.offset and scale.index >= s for i, s in r.unguided)
            for image, g in enumerate(plan.guided)
        ]
        running = [i for i, a in enumerate(actions) if a == "run"]
        self.rows = running + [i for i in running if guided[i]]
        self.counts = [self.kept(i) for i in self.rows]
        capacity = max(self.counts, default=0)
        return plan._replace(actions=tuple(actions), guided=tuple(guided), capacity=capacity)

    def kept(self, image: int) -> int:
        n = self.scale.tokens
        return n if not self.rules.keep or self.scale.index < 3 else max(1, n * (image + self.rules.offset + 2) // 6)

    def select(self, layer, group, x, ctx):
        if not self.rules.keep or self.scale.index < 3:
            return None
        index = torch.zeros(len(self.rows), max(self.counts), dtype=torch.long)
        for row, (image, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            g = torch.Generator().manual_seed(1000 * (image + self.rules.offset) + 10 * self.scale.index + layer)
            index[row, :count] = torch.randperm(self.scale.tokens, generator=g)[:count].sort().values
        return Selection(index.to(x.device), torch.tensor(self.counts, device=x.device))


def ragged_batches_equal_single_runs(pipe) -> None:
    rules = {"skip": ((1, 4), (2, 2)), "stop": ((0, 6),), "unguided": ((1, 3), (2, 5))}
    batch = ask(pipe, 3, method=Rules(keep=True, **rules))
    traced = batch.trace.to_dict()["images"]
    for i in range(3):
        single = ask(pipe, 1, first=i, method=Rules(keep=True, offset=i, **rules))
        for k, b in enumerate(batch.tokens):
            assert torch.equal(b[i : i + 1], single.tokens[k]), (i, k)
        one = single.trace.to_dict()["images"][0]
        assert {**one, "index": i} == traced[i]
    assert traced[0]["stopped_after"] == 6
    assert not traced[1]["scales"][4]["ran"]
    assert [e["rows"] for e in traced[2]["scales"][:6]] == [2, 2, 0, 2, 2, 1]
