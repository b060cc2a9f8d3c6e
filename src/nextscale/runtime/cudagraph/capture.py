"""What a captured scale leaves behind, and the pieces it was captured in."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nextscale.kernels.pinned_copy import copy_pinned
from nextscale.methods.base import Choices, Numbers
from nextscale.methods.selection import Packed, Selection
from nextscale.runtime.eager import ScaleOutput

SHORT = 4096  # numbers of a report


@dataclass(frozen=True)
class Recorded:
    """What a scale leaves behind. Graphs share memory: `output` and `chosen` hold until another one is replayed."""

    output: ScaleOutput
    chosen: Chosen
    readback: HostReadback
    memory: dict[Hashable, Any]  # of the policy
    level: list[bool]  # of each layer: its rows are still equally long
    cond: int  # of the memory: where it lies


@dataclass(frozen=True)
class Captured:
    graph: Any  # like `GraphSegments`
    made: Recorded


@dataclass(frozen=True)
class Chosen:
    """The selections of all layers, each stored once."""

    masks: Tensor | None  # of every one [selections, R, N], True where a cell was chosen
    which: list[dict[str, int | None]]  # per layer and part; None = all tokens

    @classmethod
    def of(cls, chosen: Choices, tokens: int) -> Chosen:
        distinct = {id(c): c for parts in chosen for c in parts.values() if c is not None}
        number = {key: n for n, key in enumerate(distinct)}
        which = [{p: None if c is None else number[id(c)] for p, c in parts.items()} for parts in chosen]
        packed = [c.slot for c in distinct.values() if isinstance(c, Packed)]
        if len(packed) == len(distinct) > 0:
            return cls(torch.stack(packed) >= 0, which)
        return cls(torch.stack([c.mask(tokens) for c in distinct.values()]) if distinct else None, which)

    @property
    def everywhere(self) -> bool:
        """Whether every layer selects its tokens."""
        return all(n is not None for parts in self.which for n in parts.values())

    def copied(self, places: Tensor | None) -> Kept:
        """For the trace, which must outlive the next replay; of the rows at these places alone."""
        return Kept(self if self.masks is None else replace(self, masks=self.masks.clone()), places)


class Kept(Choices):
    """The selections of every layer and part; None = all tokens. Hundreds of tensors, made when somebody looks."""

    def __init__(self, chosen: Chosen, places: Tensor | None = None) -> None:
        self.chosen, self.places = chosen, places

    @functools.cached_property
    def layers(self) -> list[dict[str, Selection | None]]:
        masks = self.chosen.masks
        if masks is not None and self.places is not None:
            masks = masks[:, self.places.to(masks.device)]
        made = [] if masks is None else [Packed.of_mask(mask) for mask in masks]
        return [{p: None if n is None else made[n] for p, n in parts.items()} for parts in self.chosen.which]

    def __len__(self) -> int:
        return len(self.chosen.which)

    def __getitem__(self, layer: Any) -> Any:
        return self.layers[layer]


class GraphSegments:
    """CUDA graphs that follow each other. While the device runs one, the host hands over the next."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.graphs: list[Any] = []
        self.telling = -1  # the piece behind which all that the host asks for has been written
        self.ready_event = torch.cuda.Event()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What is asked of the device meanwhile is not done, but becomes a graph."""
        # Old programs must not be collected now: their memory cannot be given back during a capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            self.begin()
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # the graph is of no use: its error would hide what went wrong
                    self.end()
                raise
            self.end()
        finally:
            if collects:
                gc.enable()

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self.pool)

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def cut(self) -> None:
        self.end()
        self.begin()

    def tell(self) -> None:
        self.telling = len(self.graphs) - 1
        self.cut()

    def replay(self) -> None:
        for n, graph in enumerate(self.graphs):
            graph.replay()
            if n == self.telling:
                self.ready_event.record()

    def wait(self) -> None:
        """Until the newest replay has told what it tells."""
        self.ready_event.synchronize()


@dataclass
class Capturing:
    """A scale while it is captured, or run once before."""

    pieces: GraphSegments | None
    readback: HostReadback | None  # made at the first run: its memory has to be there before anything is captured
    pages: Tensor | None = None  # of the KV caches: how many are taken, [1]
    largest: Tensor | None = None  # logits
    at_work: Tensor | None = None  # [R], if some rows rest

    def tell(self, report: dict[str, Tensor]) -> None:
        assert self.largest is not None
        self.readback = self.readback or HostReadback(report, self.largest, self.pages)
        self.readback.write(report, self.largest, self.pages)
        if self.pieces is not None:
            self.pieces.tell()


class HostReadback:
    """What a scale reports, its largest logits, and how many pages are taken behind it, if there are such. Short parts
    end in memory that the host can read."""

    def __init__(self, report: dict[str, Tensor], largest: Tensor, pages: Tensor | None = None) -> None:
        self.long = {name: readback for name, readback in report.items() if readback.numel() > SHORT}
        short = {name: readback for name, readback in report.items() if name not in self.long}
        ends = list(itertools.accumulate((readback.numel() for readback in short.values()), initial=0))
        self.end, self.behind = ends[-1], ends[-1] + largest.numel()
        self.places = {
            name: (slice(*ends[n : n + 2]), readback.shape) for n, (name, readback) in enumerate(short.items())
        }
        size = self.behind + (pages is not None)
        self.host = torch.empty(size, dtype=torch.float64, pin_memory=largest.is_cuda)
        self.numbers = self.host.numpy()  # the same memory: arrays are read faster than tensors

    def write(self, report: dict[str, Tensor], largest: Tensor, pages: Tensor | None = None) -> None:
        self.long = {name: report[name] for name in self.long}
        numbers = [report[name].double().flatten() for name in self.places] + [largest.double()]
        copy_pinned(self.host, torch.cat(numbers if pages is None else [*numbers, pages.double()]))

    @property
    def largest(self) -> list[float]:
        """The largest logit after guidance and before: NaN or infinite if any is."""
        return self.numbers[self.end : self.behind].tolist()


class Report(Mapping[str, Numbers]):
    """What one replay reports. Whoever asks for a number waits for it."""

    def __init__(self, readback: HostReadback, wait: Callable[[], None], images: Sequence[int] | None = None) -> None:
        """Of these images alone; None = all of them."""
        self.source: tuple[HostReadback, Callable[[], None]] | None = readback, wait  # until it has been read
        self.images = None if images is None else list(images)
        self.long = {name: part.clone() for name, part in readback.long.items()}
        self.places = readback.places
        self.names = (*self.places, *self.long)
        self.behind = readback.behind
        self.numbers = readback.numbers

    @property
    def pages(self) -> int:
        """That are taken behind this scale."""
        return int(self.read()[self.behind])

    def __getitem__(self, name: str) -> Numbers:
        if name in self.long:
            found: Numbers = self.long[name]
        else:
            place, shape = self.places[name]
            found = self.read()[place].reshape(shape)
        return found if self.images is None else found[self.images]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def read(self) -> np.ndarray:
        """Copy what the next replay will write over."""
        if self.source is not None:
            readback, wait = self.source
            wait()
            self.numbers, self.source = readback.numbers.copy(), None
        return self.numbers
