"""Where a run computed: its trace as maps."""

from __future__ import annotations

import numpy as np

from nextscale.engine.trace import Trace


def computed_overall(trace: Trace, image: int = 0) -> np.ndarray:
    """The share over all scales, weighted by their tokens, on the grid of the last one."""
    h, w = trace.schedule.last
    total = np.zeros((h, w))
    for scale in trace.schedule:
        y, x = np.arange(h) * scale.h // h, np.arange(w) * scale.w // w
        total += scale.tokens * trace.computed(image, scale.index + 1)[y[:, None], x]
    return total / trace.schedule.tokens
