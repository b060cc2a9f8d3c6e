"""Classifier-free guidance: which rows run, and how two rows become one prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from nextscale.errors import NextscaleError
from nextscale.io.arguments import is_single, read_list, read_number
from nextscale.kernels import bit_sampling

# Of the host; or in float64 on the device, where a captured scale reads it: [], or [B] where images have their own.
Number = float | Tensor


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


def on_device(number: Number) -> TypeGuard[Tensor]:
    """Whether only the device knows its value, so that no code may depend on it."""
    return isinstance(number, Tensor)


def as_of(number: Number, like: Tensor) -> Number:
    """As exactly as torch reads a number of the host: casting it once is faster than at every place."""
    return beside(number, like).to(like.dtype) if on_device(number) else number


def beside(numbers: Tensor, like: Tensor) -> Tensor:
    """One for all, or for each image of `like` [B, ...]."""
    return numbers.view(-1, *(1,) * (like.ndim - 1)) if numbers.ndim else numbers


def guide(rows: Tensor, images: int, guided: Tensor | None, weight: Number, by: Number = 1.0) -> Tensor:
    """Rows [conditional of every image, unconditional of the guided ones], multiplied with `by` -> one per image.

    `guided` holds the places of the guided images among the conditional rows; None = all or nothing.
    """
    weighted = on_device(weight) or weight != 1
    if weighted and guided is None and len(rows) == 2 * images and bit_sampling.supports(rows):
        return bit_sampling.fused_combine(rows, images, weight, by)
    rows = rows.mul(as_of(by, rows)) if on_device(by) or by != 1 else rows
    conditional, unconditional = rows[:images], rows[images:]
    if not len(unconditional) or (not on_device(weight) and weight == 1):
        return conditional
    guided = None if guided is None else guided.to(rows.device)
    alone = conditional if guided is None else conditional[guided]
    mixed = as_of(weight, rows) * alone + as_of(1 - weight, rows) * unconditional
    if on_device(weight):  # nothing of a row that is infinite is not a number
        mixed = torch.where(beside(weight == 1, alone), alone, mixed)
    return mixed if guided is None else conditional.index_copy(0, guided, mixed)


def guide_hidden(rows: Tensor, images: int, guided: Tensor | None, weight: Number) -> Tensor:
    """Guidance between two blocks: both rows of a guided image go on with the combined state."""
    if len(rows) == images or (not on_device(weight) and weight == 1):
        return rows
    mixed = guide(rows, images, guided, weight)
    mixed = torch.cat((mixed, mixed if guided is None else mixed[guided.to(rows.device)]))
    if not on_device(weight):
        return mixed
    none = weight == 1
    return torch.where(beside(torch.cat((none, none)) if none.ndim else none, rows), rows, mixed)
