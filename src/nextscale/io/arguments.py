"""Arguments as users give them: read once, by kind, and refused in one sentence that names them."""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nextscale.errors import NextscaleError, choices

MAX_REPR = 60  # characters of a value that an error shows
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4096  # bytes of a file's name, and of a path: no disk takes more
MAX_COUNT = 2**40  # of a count: what is more is a mistake, and lists of that length must not be made


def short_repr(value: object) -> str:
    """Show a value inside an error sentence: on one line, and no longer than it needs to be recognized."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)} of {value.dtype}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever it is, it is not what was asked for
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 4]} ..."


def is_flag(value: object) -> bool:
    """Whether the value is True or False, of whatever library."""
    single = isinstance(value, Tensor) and value.dtype == torch.bool and not value.ndim
    return single or isinstance(value, (bool, np.bool_))


def read_count(value: Any, name: str, least: int = 0, most: int = MAX_COUNT) -> int:
    """Read a whole number, of whatever library."""
    try:
        number = None if is_flag(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # the last two: tensors of several numbers, or of none
        number = None
    if number is None or not least <= number <= most:
        allowed = (
            f", from {least} to {most}" if most < MAX_COUNT else f", at least {least}" if least > -MAX_COUNT else ""
        )
        raise NextscaleError(f"{name} must be a whole number{allowed}, not {short_repr(value)}")
    return number


def is_single(value: Any) -> bool:
    """Whether the value is no list of anything."""
    return not isinstance(value, Sequence) and not getattr(value, "ndim", 0)


def read_number(value: Any, name: str, allowed: str = "a finite number") -> float:
    """Read a number, of whatever library; Python's own stay as they are."""
    if type(value) in (int, float):
        number = value
    else:
        try:
            number = math.nan if is_flag(value) or isinstance(value, (str, bytes, bytearray)) else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
    try:
        finite = math.isfinite(number)
    except OverflowError:  # a whole number that no float can be
        finite = False
    if not finite:
        raise NextscaleError(f"{name} must be {allowed}, not {short_repr(value)}")
    return number


def read_list(value: Any, name: str, allowed: str) -> list[Any]:
    """Read the elements of a list, a tuple, a tensor or an array."""
    many = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    if not many and not (isinstance(value, (Tensor, np.ndarray)) and value.ndim):
        raise NextscaleError(f"{name} must be {allowed}, not {short_repr(value)}")
    return list(value)


def read_flag(value: Any, name: str) -> bool:
    if not is_flag(value):
        raise NextscaleError(f"{name} must be True or False, not {short_repr(value)}")
    return bool(value)


def read_text(value: Any, name: str) -> str:
    """Read a word, a name or a path, which must be one that a file can have."""
    if not isinstance(value, str) or not can_be_path(value):
        raise NextscaleError(f"{name} must be a short text, not {short_repr(value)}")
    return value


def can_be_path(text: str) -> bool:
    longest = max(len(part.encode(errors="replace")) for part in text.split("/"))
    return longest <= MAX_NAME_BYTES and len(text) < MAX_PATH_BYTES and "\0" not in text


def read_choice(value: Any, name: str, allowed: Iterable[str]) -> str:
    known = list(allowed)
    if not isinstance(value, str) or value not in known:
        raise NextscaleError(f"unknown {name} {short_repr(value)}; allowed: {choices(known)}")
    return value


def read_path(value: Any, name: str) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise NextscaleError(f"{name} must be a name or a path, not {short_repr(value)}")
    if not can_be_path(path):
        reason = "it holds a zero byte" if "\0" in path else "File name too long"
        raise NextscaleError(f"{name} {short_repr(path)} cannot be read: {reason}")
    return path


def require_callback(value: Any, name: str, takes: str) -> None:
    """Require a function of one argument, as far as its signature says."""
    if not callable(value):
        raise NextscaleError(f"{name} must be a function of one argument, {takes}, not {short_repr(value)}")
    try:
        parameters = inspect.signature(value)
    except (TypeError, ValueError):  # some that are written in C do not tell
        return
    try:
        parameters.bind(None)
    except TypeError as error:
        raise NextscaleError(f"{name} must be a function of one argument, {takes}: {error}") from None
