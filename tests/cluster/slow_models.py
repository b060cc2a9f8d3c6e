"""Models that workers load: small ones that note who they are and take their time, so that a test can interfere."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.prompts import AnyText

from nextscale.errors import NextscaleError
from nextscale.pipeline import Pipeline
from nextscale.testing import tiny_infinity, tiny_var

SECONDS = 0.15  # of a call, at least


class Slow(Pipeline):
    """A pipeline whose calls last; `bad` is a class that it cannot draw today."""

    bad: int | None = None

    def __call__(self, prompt: Any, **options: Any) -> Any:
        time.sleep(SECONDS)
        if self.bad is not None and self.bad in prompt:
            raise NextscaleError(f"class {self.bad} is not drawn today")
        return super().__call__(prompt, **options)


def load(pids: Path | None, bad: int | None = None) -> Pipeline:
    pipe = tiny_var()
    pipe.__class__, pipe.bad = Slow, bad
    if pids is not None:
        (pids / str(os.getpid())).touch()
    return pipe


def slow(pids: Path | None = None, bad: int | None = None) -> Callable[[], Pipeline]:
    if pids is not None:
        pids.mkdir(exist_ok=True)
    return functools.partial(load, pids, bad)


def texts() -> Pipeline:
    pipe = tiny_infinity()
    pipe.text_encoder = AnyText(pipe)
    return pipe
