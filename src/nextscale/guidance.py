"""Classifier-free guidance: which rows run, and how two rows become one prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nextscale.arguments import is_single, read_list, read_number
from nextscale.errors import NextscaleError
from nextscale.kernels.bits import fused_combine, takes


def per_scale(value: float | Sequence[float], scales: int, what: str) -> tuple[float, ...]:
    """One finite number for every scale; a single number is repeated."""
    allowed = f"a number or a list of {scales} numbers, all of them finite"
    if is_single(value):
        return (float(read_number(value, what, allowed)),) * scales
    values = tuple(float(read_number(v, what, allowed)) for v in read_list(value, what, allowed))
    if len(values) != scales:
        raise NextscaleError(f"{what} has {len(values)} values, but the schedule has {scales} scales")
    return values


def ramp(value: float | Sequence[float], scales: int) -> tuple[float, ...]:
    """VAR's convention: 0 = none, and a single number grows linearly from 0 at the first scale."""
    extra = per_scale(value, scales, "guidance_scale")
    if is_single(value):
        extra = tuple(e * k / max(scales - 1, 1) for k, e in enumerate(extra))
    return tuple(1 + e for e in extra)


def combine(rows: Tensor, images: int, guided: Tensor | None, weight: float, by: float = 1.0) -> Tensor:
    """Rows [conditional of every image, unconditional of the guided ones], multiplied with `by` -> one per image.

    `guided` holds the places of the guided images among the conditional rows; None = all or nothing.
    """
    if takes(rows) and weight != 1 and guided is None and len(rows) == 2 * images:
        return fused_combine(rows, images, weight, by)
    rows = rows if by == 1 else rows.mul(by)
    conditional, unconditional = rows[:images], rows[images:]
    if weight == 1 or not len(unconditional):
        return conditional
    if guided is None:
        return weight * conditional + (1 - weight) * unconditional
    guided = guided.to(rows.device)
    mixed = weight * conditional[guided] + (1 - weight) * unconditional
    return conditional.index_copy(0, guided, mixed)


def combine_inside(rows: Tensor, images: int, guided: Tensor | None, weight: float) -> Tensor:
    """Guidance between two blocks: both rows of a guided image go on with the combined state."""
    if weight == 1 or len(rows) == images:
        return rows
    mixed = combine(rows, images, guided, weight)
    return torch.cat((mixed, mixed if guided is None else mixed[guided.to(rows.device)]))
