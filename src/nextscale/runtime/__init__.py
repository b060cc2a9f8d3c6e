"""How a planned scale is run: eager, compiled, as CUDA graphs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from nextscale.engine.schedule import Schedule
from nextscale.errors import NextscaleError
from nextscale.io.arguments import read_choice
from nextscale.runtime.compiled import Compiled
from nextscale.runtime.cudagraph.executor import Graphs
from nextscale.runtime.eager import Eager

logger = logging.getLogger(__name__)
T = TypeVar("T")

RUNTIMES: dict[str, type[Eager]] = {kind.name: kind for kind in (Eager, Compiled, Graphs)}
OLDEST = (7, 0)  # of the GPUs that Triton, and so torch.compile, writes code for


def check_runtime(runtime: str) -> None:
    read_choice(runtime, "runtime", RUNTIMES)


def make_executor(runtime: str, device: torch.device) -> Eager:
    check_runtime(runtime)
    missing = why_missing(runtime, device)
    if missing:
        logger.warning("runtime %s needs %s; the pictures are made with runtime eager", runtime, missing)
        return Eager()
    return RUNTIMES[runtime]()


def with_enough_memory(make: Callable[[Eager], T], executor: Eager, again: bool, images: int, schedule: Schedule) -> T:
    """What `make` makes. If memory runs out, it is tried again without what is kept for other calls; then the eager
    runtime, which keeps nothing at all, has a try."""
    others = True
    while others:  # a new try begins when the error is gone: its traceback holds what the old one had allocated
        try:
            return make(executor)
        except torch.OutOfMemoryError as error:
            others = again and executor.forget_others()
            if not others:
                executor.forget()
                if not again or type(executor) is Eager:
                    raise out_of_memory(error, images, schedule) from None
        torch.cuda.empty_cache()
    logger.warning("the GPU's memory is too small for runtime %s here; made with runtime eager", executor.name)
    try:
        return make(Eager())
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, images, schedule) from None


def out_of_memory(error: Exception, images: int, schedule: Schedule) -> NextscaleError:
    asked = re.search(r"Tried to allocate [\d.]+ \w+", str(error))
    pictures = "a picture" if images == 1 else f"{images} pictures"
    return NextscaleError(
        f"the device ran out of memory for {pictures} of {schedule.tokens} tokens"
        f"{' (' + asked.group().lower() + ')' if asked else ''}; "
        "allowed: fewer pictures at once, a smaller size, dtype bfloat16, a method that drops tokens"
    )


def why_missing(runtime: str, device: torch.device) -> str:
    """What the device lacks for it, if anything."""
    if runtime == "graphs" and device.type != "cuda":
        return f"a CUDA GPU, not {device.type}"
    if runtime != "eager" and device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"a GPU of compute capability {OLDEST[0]}.{OLDEST[1]}"
    return ""
