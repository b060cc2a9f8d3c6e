"""The frame of every method: what is decided, per image, and who is asked when.

A `Method` is configuration; `Method.start` makes the `Policy` that is at work during one call.
The base `Policy` decides nothing: it is the plain run.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from nextscale.sampling import Sampling
from nextscale.schedule import Scale, Schedule

Group = tuple[str, ...]  # parts of a block whose tokens are selected together


@dataclass(frozen=True)
class Context:
    """What a policy may know of the call: never which backbone it is on."""

    images: int
    schedule: Schedule
    sampling: Sampling
    depth: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class ScalePlan:
    """Decided on the host, once per scale."""

    actions: tuple[str, ...]  # per image: "run", "skip" this scale, or "stop" for good
    guided: tuple[bool, ...]  # per image: whether its unconditional row still runs; it cannot come back
    capacity: int  # the most tokens that a layer keeps, per row
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Selection:
    """The tokens that go through a layer. Slots at or behind `count` are padding."""

    index: Tensor  # [R, K] cells in raster order
    count: Tensor  # [R]


@dataclass
class Stats:
    """What a scale's blocks report: per layer, the kept count [R] of every part (None = all)."""

    kept: list[dict[str, Tensor | None]] = field(default_factory=list)


class Policy:
    """A method at work on one call. Everything between begin_scale and end_scale stays on the device."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def expected_tokens(self) -> int:
        """KV slots per row to reserve at once; 0 = grow scale by scale with what is kept."""
        return self.context.schedule.tokens

    def begin_scale(self, scale: Scale) -> ScalePlan:
        c = self.context
        return ScalePlan(
            actions=("run",) * c.images,
            guided=(scale.index < c.sampling.guided_until,) * c.images,
            capacity=scale.tokens,
            groups=(c.parts,),
        )

    def select(self, layer: int, group: Group, x: Tensor) -> Selection | None:
        """The tokens that pass through `group` of `layer`; None = all of them."""
        return None

    def fill(self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor) -> Tensor:
        """The group's output for all tokens, from its input x and the chosen tokens' output y."""
        return y if chosen is None else scatter(x, chosen, y)

    def complete(self, scale: Scale, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Last word on the hidden state; a weight [B, N] of 0 makes a cell add nothing."""
        return x, None

    def end_scale(self, scale: Scale, x: Tensor, logits: Tensor, stats: Stats) -> None:
        """See what came out: x [R, N, C] and the unguided logits [R, N, ...]."""


@dataclass(frozen=True)
class Method(ABC):
    """A frozen dataclass whose fields are its configuration."""

    name: ClassVar[str]

    @abstractmethod
    def start(self, context: Context) -> Policy: ...

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "fields": dataclasses.asdict(self)}


def gather(x: Tensor, chosen: Selection | None) -> Tensor:
    """The chosen tokens of x [R or 1, N, ...] -> [R, K, ...]."""
    if chosen is None:
        return x
    index = chosen.index.view(*chosen.index.shape, *(1,) * (x.ndim - 2))
    source = x.expand(len(chosen.index), *x.shape[1:])
    return source.gather(1, index.expand(-1, -1, *x.shape[2:]))


def scatter(x: Tensor, chosen: Selection, y: Tensor) -> Tensor:
    """x with the chosen tokens replaced by y [R, K, C]; padding goes nowhere."""
    slot = torch.arange(chosen.index.shape[1], device=x.device)
    real = slot < chosen.count[:, None]
    # Padding is sent to an extra cell behind the map, so that it can never collide with a real token.
    index = chosen.index.where(real, x.shape[1])[..., None].expand_as(y)
    extra = x.new_zeros(len(x), 1, x.shape[2])
    return torch.cat((x, extra), dim=1).scatter(1, index, y.to(x.dtype))[:, :-1]
