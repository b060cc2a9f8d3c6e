"""Host numbers on the device, in static buffers that a captured scale reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nextscale.errors import NextscaleError
from nextscale.kernels.pinned_copy import copy_pinned


class DeviceInputs(dict[str, Tensor]):
    """Device tensors by name."""

    def upload(self, name: str, numbers: list[float] | Tensor, device: torch.device) -> Tensor:
        new = numbers
        if not isinstance(new, Tensor):  # from pinned memory they are copied without waiting
            new = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
        if name not in self or self[name].shape != new.shape:
            self[name] = new.to(device, copy=True)
        else:
            self[name].copy_(new, non_blocking=True)
        return self[name]


class FetchedInputs(DeviceInputs):
    """Lists that a scale fetches from pinned memory when it runs: to upload them is to write them down.

    Every scale has its own line there, since the host may be some scales ahead.
    """

    def __init__(self, scales: int) -> None:
        super().__init__()
        self.scales = scales
        self.pending: dict[str, list[float]] = {}  # of the current call
        self.pinned: dict[str, tuple[Tensor, np.ndarray]] = {}  # [scales, numbers], and the same memory as an array

    def reset(self) -> None:
        """Begin another call."""
        self.pending.clear()

    def upload(self, name: str, numbers: list[float] | Tensor, device: torch.device) -> Tensor:
        if isinstance(numbers, Tensor):
            return super().upload(name, numbers, device)
        if name not in self.pinned:
            self[name] = torch.zeros(len(numbers), dtype=torch.float64, device=device)
            pinned = torch.zeros(self.scales, len(numbers), dtype=torch.float64, pin_memory=device.type == "cuda")
            self.pinned[name] = pinned, pinned.numpy()
        if len(self[name]) != len(numbers):
            raise NextscaleError(f"{name!r} was uploaded as {len(self[name])} numbers, and is {len(numbers)} now")
        self.pending[name] = numbers
        return self[name]

    def stage(self, scale: int) -> None:
        """Write the numbers where this scale will fetch them."""
        for name, numbers in self.pending.items():
            self.pinned[name][1][scale] = numbers

    def fetch(self, scale: int) -> None:
        for name in self.pending:
            copy_pinned(self[name], self.pinned[name][0][scale])
