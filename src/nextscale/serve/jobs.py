"""What the engine is asked for, what it tells while it works, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nextscale.errors import NextscaleError
from nextscale.methods.base import Method

ALL = "all"  # previews: one of every scale
Pixels = Callable[[], np.ndarray]  # uint8 [h, w, 3]; may wait for the device, so not for the engine's own thread


@dataclass(frozen=True)
class ImageJob:
    """One request: an image of the prompt for every seed."""

    model: str
    prompt: str | int  # a class number for VAR
    seeds: tuple[int, ...]
    method: Method | str = "none"  # or as the command line writes it
    height: int | None = None  # None: the model's own size
    width: int | None = None
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    previews: int | str = 0  # how many, or ALL


@dataclass(frozen=True)
class ScaleMap:
    """Where a scale was computed."""

    scale: int  # from 1
    grid: tuple[int, int]
    tokens: int  # that the layers computed, in the mean
    computed: np.ndarray  # uint8 [h, w]: 255 where all layers computed the cell


@dataclass(frozen=True)
class Preview:
    """An image as it is after a scale."""

    image_index: int
    index: int  # of the image's previews, from 0
    scale: int  # from 1
    scales: int
    grid: tuple[int, int]
    pixels: Pixels  # of the image's shape, perhaps smaller
    computed: np.ndarray | None  # as in ScaleMap, where every scale was asked for
    seconds: float  # since the run began, previews not counted


@dataclass(frozen=True)
class Finished:
    """One image of the job."""

    image_index: int
    pixels: Pixels
    seed: int
    method: str
    tokens: int  # that the layers computed, in the mean
    tokens_plain: int
    text_tokens: int
    seconds: float  # of the batch that it was made in, previews not counted
    queued: float  # seconds before that
    scales: Sequence[ScaleMap] | None = None  # where every scale was asked for


@dataclass(frozen=True)
class Failed:
    """The end of a job: a refusal, or a fault of ours."""

    error: Exception


@dataclass(frozen=True)
class Canceled:
    """The end of a job that nobody waits for."""


Event = Preview | Finished | Failed | Canceled


class InvalidJob(NextscaleError):
    """A job that can never be done, because of one of its fields."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ServeError(NextscaleError):
    """A request that another moment or another server could answer."""


class QueueFull(ServeError):
    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"the queue is full: {waiting} images are waiting; try again in {retry_after:.1f} s")
        self.retry_after = retry_after


class Draining(ServeError):
    """Nothing is accepted: the server loads, shuts down, or lost its device."""

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoMemory(ServeError):
    """The device ran out of memory, for the image alone, too."""
