"""What the host reads of a captured scale, in time or long after the next replay has overwritten its buffers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nextscale.kernels.pinned_copy import copy_pinned
from nextscale.methods.policy import Choices, Numbers
from nextscale.methods.selection import Packed, Selection

MAX_COPIED = 4096  # numbers of a report's entry: longer ones stay on the device


class HostReadback:
    """A scale's report, its largest logits, and how many pages are taken behind it, if there are any. All of that lies
    in pinned memory, but for long entries of the report."""

    def __init__(self, report: dict[str, Tensor], max_logits: Tensor, pages: Tensor | None = None) -> None:
        self.on_device = {name: entry for name, entry in report.items() if entry.numel() > MAX_COPIED}
        copied = {name: entry for name, entry in report.items() if name not in self.on_device}
        ends = list(itertools.accumulate((entry.numel() for entry in copied.values()), initial=0))
        self.report_end, self.logits_end = ends[-1], ends[-1] + max_logits.numel()
        self.slices = {name: (slice(*ends[n : n + 2]), entry.shape) for n, (name, entry) in enumerate(copied.items())}
        size = self.logits_end + (pages is not None)
        self.host = torch.empty(size, dtype=torch.float64, pin_memory=max_logits.is_cuda)
        self.numbers = self.host.numpy()  # the same memory: arrays are read faster than tensors

    def write(self, report: dict[str, Tensor], max_logits: Tensor, pages: Tensor | None = None) -> None:
        self.on_device = {name: report[name] for name in self.on_device}
        numbers = [report[name].double().flatten() for name in self.slices] + [max_logits.double()]
        copy_pinned(self.host, torch.cat(numbers if pages is None else [*numbers, pages.double()]))

    @property
    def max_logits(self) -> list[float]:
        """The largest logit after guidance and before: NaN or infinite if any is."""
        return self.numbers[self.report_end : self.logits_end].tolist()


class PendingReport(Mapping[str, Numbers]):
    """The report of one replay. Reading a number waits for it."""

    def __init__(self, readback: HostReadback, wait: Callable[[], None], images: Sequence[int] | None = None) -> None:
        """`images` are those that it has entries for; None = all of them."""
        self.source: tuple[HostReadback, Callable[[], None]] | None = readback, wait  # until it has been read
        self.images = None if images is None else list(images)
        self.on_device = {name: entry.clone() for name, entry in readback.on_device.items()}
        self.slices, self.logits_end, self.numbers = readback.slices, readback.logits_end, readback.numbers

    @property
    def pages(self) -> int:
        """Pages that are taken behind this scale."""
        return int(self.read()[self.logits_end])

    def __getitem__(self, name: str) -> Numbers:
        if name in self.on_device:
            found: Numbers = self.on_device[name]
        else:
            part, shape = self.slices[name]
            found = self.read()[part].reshape(shape)
        return found if self.images is None else found[self.images]

    def __contains__(self, name: object) -> bool:
        return name in self.slices or name in self.on_device

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self.slices, self.on_device)

    def __len__(self) -> int:
        return len(self.slices) + len(self.on_device)

    def read(self) -> np.ndarray:
        """Copy what the next replay will overwrite."""
        if self.source is not None:
            readback, wait = self.source
            wait()
            self.numbers, self.source = readback.numbers.copy(), None
        return self.numbers


@dataclass(frozen=True)
class SelectionRecord:
    """The selections of all layers, each stored once."""

    masks: Tensor | None  # [selections, R, N], True where a token was selected
    layers: list[dict[str, int | None]]  # per layer and sublayer, which of them; None = all tokens

    @classmethod
    def of(cls, chosen: Choices, tokens: int) -> SelectionRecord:
        distinct = {id(c): c for layer in chosen for c in layer.values() if c is not None}
        number = {key: n for n, key in enumerate(distinct)}
        layers = [{name: None if c is None else number[id(c)] for name, c in layer.items()} for layer in chosen]
        packed = [c.slot for c in distinct.values() if isinstance(c, Packed)]
        if len(packed) == len(distinct) > 0:
            return cls(torch.stack(packed) >= 0, layers)
        return cls(torch.stack([c.mask(tokens) for c in distinct.values()]) if distinct else None, layers)

    @property
    def all_layers_pruned(self) -> bool:
        return all(n is not None for layer in self.layers for n in layer.values())

    def copied(self, rows: Tensor | None) -> LazySelections:
        """Copy what the next replay will overwrite; of these rows alone."""
        return LazySelections(self if self.masks is None else replace(self, masks=self.masks.clone()), rows)


class RecordedSelection(Selection):
    """A selection as a mask [R, N]: most of those who look want no more of it."""

    def __init__(self, cells: Tensor, count: Tensor) -> None:
        object.__setattr__(self, "cells", cells)
        object.__setattr__(self, "count", count)

    cells: Tensor

    @functools.cached_property
    def index(self) -> Tensor:
        return Packed.of_mask(self.cells).index

    def mask(self, tokens: int) -> Tensor:
        return self.cells


class LazySelections(Choices):
    """The selections of every layer and sublayer; None = all tokens. Hundreds of tensors, made when somebody looks."""

    def __init__(self, record: SelectionRecord, rows: Tensor | None = None) -> None:
        self.record, self.rows = record, rows

    @functools.cached_property
    def layers(self) -> list[dict[str, Selection | None]]:
        masks = self.record.masks
        if masks is not None and self.rows is not None:
            masks = masks[:, self.rows.to(masks.device)]
        made = [] if masks is None else list(map(RecordedSelection, masks, masks.sum(-1)))
        return [{name: None if n is None else made[n] for name, n in layer.items()} for layer in self.record.layers]

    def __len__(self) -> int:
        return len(self.record.layers)

    def __getitem__(self, layer: Any) -> Any:
        return self.layers[layer]
