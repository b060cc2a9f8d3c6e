"""Numbers of the host on the device, at places that stay: a captured scale knows them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nextscale.errors import NextscaleError
from nextscale.kernels.pinned_copy import carry


class HostNumbers(dict[str, Tensor]):
    """By name."""

    def tell(self, name: str, numbers: list[float] | Tensor, device: torch.device) -> Tensor:
        new = numbers
        if not isinstance(new, Tensor):  # from pinned memory they are copied without waiting
            new = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
        if name not in self or self[name].shape != new.shape:
            self[name] = new.to(device, copy=True)
        else:
            self[name].copy_(new, non_blocking=True)
        return self[name]


class FetchedNumbers(HostNumbers):
    """Lists that a scale fetches from the host's memory when it is run: to tell them is to write them down.

    Every scale has a place there of its own, for the host may be some scales ahead.
    """

    def __init__(self, scales: int) -> None:
        super().__init__()
        self.scales = scales
        self.told: dict[str, list[float]] = {}  # in the call at work
        self.places: dict[str, tuple[Tensor, np.ndarray]] = {}  # [scales, numbers], and the same memory as an array

    def begin(self) -> None:
        """Another call."""
        self.told.clear()

    def tell(self, name: str, numbers: list[float] | Tensor, device: torch.device) -> Tensor:
        if isinstance(numbers, Tensor):
            return super().tell(name, numbers, device)
        if name not in self.places:
            self[name] = torch.zeros(len(numbers), dtype=torch.float64, device=device)
            place = torch.zeros(self.scales, len(numbers), dtype=torch.float64, pin_memory=device.type == "cuda")
            self.places[name] = place, place.numpy()
        if len(self[name]) != len(numbers):
            raise NextscaleError(f"{name!r} was told as {len(self[name])} numbers, and is {len(numbers)} now")
        self.told[name] = numbers
        return self[name]

    def put(self, scale: int) -> None:
        """To where the scale will look for them."""
        for name, numbers in self.told.items():
            self.places[name][1][scale] = numbers

    def fetch(self, scale: int) -> None:
        for name in self.told:
            carry(self[name], self.places[name][0][scale])
