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

LONGEST = 60  # characters of a value that an error shows
NAME, PATH = 255, 4096  # bytes of a file's name, and of a path: no disk takes more
LARGEST = 2**40  # of a count: what is more is a mistake, and lists of that length must not be made


def shown(value: object) -> str:
    """A value inside an error sentence: on one line, and no longer than it needs to be recognized."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)} of {value.dtype}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever it is, it is not what was asked for
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def is_flag(value: object) -> bool:
    """True or False, of whatever library."""
    single = isinstance(value, Tensor) and value.dtype == torch.bool and not value.ndim
    return single or isinstance(value, (bool, np.bool_))


def read_count(value: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """A whole number, of whatever library."""
    try:
        number = None if is_flag(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # the last two: tensors of several numbers, or of none
        number = None
    if number is None or not least <= number <= most:
        allowed = f", from {least} to {most}" if most < LARGEST else f", at least {least}" if least > -LARGEST else ""
        raise NextscaleError(f"{name} must be a whole number{allowed}, not {shown(value)}")
    return number


def is_single(value: Any) -> bool:
    """Whether it is no list of anything."""
    return not isinstance(value, Sequence) and not getattr(value, "ndim", 0)


def read_number(value: Any, name: str, allowed: str = "a finite number") -> float:
    """A number, of whatever library; Python's own stay as they are."""
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
        raise NextscaleError(f"{name} must be {allowed}, not {shown(value)}")
    return number


def read_list(value: Any, name: str, allowed: str) -> list[Any]:
    """The elements of a list, a tuple, a tensor or an array."""
    many = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    if not many and not (isinstance(value, (Tensor, np.ndarray)) and value.ndim):
        raise NextscaleError(f"{name} must be {allowed}, not {shown(value)}")
    return list(value)


def read_flag(value: Any, name: str) -> bool:
    if not is_flag(value):
        raise NextscaleError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def read_text(value: Any, name: str) -> str:
    """A word, a name or a path, which must be one that a file can have."""
    if not isinstance(value, str) or not can_be_path(value):
        raise NextscaleError(f"{name} must be a short text, not {shown(value)}")
    return value


def can_be_path(text: str) -> bool:
    longest = max(len(part.encode(errors="replace")) for part in text.split("/"))
    return longest <= NAME and len(text) < PATH and "\0" not in text


def read_choice(value: Any, name: str, allowed: Iterable[str]) -> str:
    known = list(allowed)
    if not isinstance(value, str) or value not in known:
        raise NextscaleError(f"unknown {name} {shown(value)}; allowed: {choices(known)}")
    return value


def read_path(value: Any, name: str) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise NextscaleError(f"{name} must be a name or a path, not {shown(value)}")
    if not can_be_path(path):
        reason = "it holds a zero byte" if "\0" in path else "File name too long"
        raise NextscaleError(f"{name} {shown(path)} cannot be read: {reason}")
    return path


def require_callback(value: Any, name: str, takes: str) -> None:
    """A function of one argument, as far as a function tells."""
    if not callable(value):
        raise NextscaleError(f"{name} must be a function of one argument, {takes}, not {shown(value)}")
    try:
        parameters = inspect.signature(value)
    except (TypeError, ValueError):  # some that are written in C do not tell
        return
    try:
        parameters.bind(None)
    except TypeError as error:
        raise NextscaleError(f"{name} must be a function of one argument, {takes}: {error}") from None
