"""What a captured scale leaves behind, and the pieces it was captured in."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nextscale.methods.selection import Selection
from nextscale.runtime.eager import Step

SHORT = 4096  # numbers of a report
Used = tuple[int, bool]  # slots of a layer's cache that the host knows to be used, and whether its rows differ


@dataclass(frozen=True)
class Recorded:
    """What a scale leaves behind. Graphs share memory: `step` and `chosen` hold until another one is replayed."""

    step: Step
    chosen: Chosen
    told: Told
    memory: dict[Hashable, Any]  # of the policy
    kv: list[Used]


@dataclass(frozen=True)
class Captured:
    graph: Any  # with a `replay`
    made: Recorded


@dataclass(frozen=True)
class Chosen:
    """The selections of all layers, each stored once."""

    index: Tensor | None  # [R, K of all selections]
    count: Tensor | None  # [selections, R]
    sizes: list[int]  # K of each
    which: list[dict[str, int | None]]  # per layer and part; None = all tokens

    @classmethod
    def of(cls, chosen: list[dict[str, Selection | None]]) -> Chosen:
        distinct = {id(c): c for parts in chosen for c in parts.values() if c is not None}
        number = {key: n for n, key in enumerate(distinct)}
        which = [{p: None if c is None else number[id(c)] for p, c in parts.items()} for parts in chosen]
        if not distinct:
            return cls(None, None, [], which)
        index = torch.cat([c.index for c in distinct.values()], dim=1)
        count = torch.stack([c.count for c in distinct.values()])
        return cls(index, count, [c.index.shape[1] for c in distinct.values()], which)

    def copied(self) -> list[dict[str, Selection | None]]:
        """For the trace, which must outlive the next replay."""
        if self.index is None or self.count is None:
            return [dict.fromkeys(parts) for parts in self.which]
        parts = self.index.clone().split(self.sizes, dim=1)
        made = [Selection(i, c) for i, c in zip(parts, self.count.clone(), strict=True)]
        return [{p: None if n is None else made[n] for p, n in parts.items()} for parts in self.which]


class Pieces:
    """CUDA graphs that follow each other. While the device runs one, the host hands over the next."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.graphs: list[Any] = []

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self.pool)

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def replay(self) -> None:
        for graph in self.graphs:
            graph.replay()


class Told:
    """What a scale reports. Short parts end in memory that the host reads without asking the device once more."""

    def __init__(self, report: dict[str, Tensor]) -> None:
        self.report = report
        self.long = {name: told for name, told in report.items() if told.numel() > SHORT}
        self.shapes = {name: told.shape for name, told in report.items() if name not in self.long}
        numbers = sum(shape.numel() for shape in self.shapes.values())
        pinned = any(told.is_cuda for told in report.values())
        self.host = torch.empty(numbers, dtype=torch.float64, pin_memory=pinned)

    def write(self, report: dict[str, Tensor]) -> None:
        self.report, self.long = report, {name: report[name] for name in self.long}
        if self.shapes:
            numbers = torch.cat([report[name].double().flatten() for name in self.shapes])
            self.host.copy_(numbers, non_blocking=True)

    def later(self) -> dict[str, Tensor]:
        """On the device: whoever looks at them waits."""
        return {name: told.clone() for name, told in self.report.items()}

    def read(self) -> dict[str, Tensor]:
        """After the device has written."""
        parts = self.host.clone().split([shape.numel() for shape in self.shapes.values()])
        short = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return short | {name: told.clone() for name, told in self.long.items()}
