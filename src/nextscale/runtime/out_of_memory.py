"""Try again when memory runs out, with less kept, then with the eager runtime."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from nextscale.engine.schedule import Schedule
from nextscale.errors import OutOfMemory
from nextscale.runtime.base import Executor
from nextscale.runtime.eager import Eager

logger = logging.getLogger(__name__)
T = TypeVar("T")


def with_enough_memory(
    run: Callable[[Executor], T], executor: Executor, again: bool, images: int, schedule: Schedule
) -> T:
    """Run; if memory runs out and it may be done `again`, try without what is kept for other calls, then eagerly."""
    tries: list[Executor] = [executor]
    while tries:  # a new try begins when the error is gone: its traceback holds what the old one had allocated
        current = tries.pop()
        try:
            return run(current)
        except torch.OutOfMemoryError as error:
            if again and current.forget_others():
                tries.append(current)
            else:
                current.forget()
                if not again or type(current) is Eager:
                    raise out_of_memory(error, images, schedule) from None
                logger.warning(
                    "the GPU's memory is too small for runtime %s here; made with runtime eager", current.name
                )
                tries.append(Eager())
        torch.cuda.empty_cache()
    raise AssertionError("the eager runtime has the last try")


def out_of_memory(error: Exception, images: int, schedule: Schedule) -> OutOfMemory:
    asked = re.search(r"Tried to allocate [\d.]+ \w+", str(error))
    batch = "an image" if images == 1 else f"{images} images"
    return OutOfMemory(
        f"the device ran out of memory for {batch} of {schedule.tokens} tokens"
        f"{' (' + asked.group().lower() + ')' if asked else ''}; "
        "allowed: fewer images at once, a smaller size, dtype bfloat16, a method that drops tokens"
    )
