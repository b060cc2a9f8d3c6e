"""An image while it is made: after which scales it is shown, and its pixels on the way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.io.images import as_output, to_bytes
from nextscale.serve.jobs import ALL, Pixels

FIRST_SHOWN = 4  # scales before it, counted from 1, show nothing that a person could recognize


def preview_scales(wanted: int | str, seconds: Sequence[float]) -> tuple[int, ...]:
    """The scales (from 1) after which an image is shown; `seconds` that each is expected to take. Previews show what is
    there at moments evenly spaced in time; none is of the last scale, which is the image itself, and of a number of
    previews none is before the fourth."""
    scales = len(seconds)
    if wanted == ALL:
        return tuple(range(1, scales))
    ends = np.cumsum(seconds)
    last = max((s for s in range(1, scales + 1) if seconds[s - 1] > 0), default=scales)  # the others are left out
    candidates = range(FIRST_SHOWN, last)
    number, shown = min(int(wanted), len(candidates)), list[int]()
    for n in range(1, number + 1):
        first, latest = (shown[-1] + 1 if shown else FIRST_SHOWN), last - 1 - (number - n)  # room for those that follow
        ended = int(np.searchsorted(ends, ends[-1] * n / (number + 1), side="right"))  # scales until that moment
        shown.append(min(max(ended, first), latest))
    return tuple(shown)


@torch.inference_mode()
def decode_preview(decode: Callable[[Tensor], Tensor], features: Tensor, small: bool) -> Tensor:
    """Decode maps [b, d, H, W] to images in [0, 1]; small ones have half the side and take a quarter of the time."""
    if small:
        h, w = features.shape[2:]
        features = F.interpolate(features, size=((h + 1) // 2, (w + 1) // 2), mode="area")
    return as_output(decode(features.float()), "pt")


@torch.inference_mode()
def pixels_of(images: Tensor) -> list[Pixels]:
    """The pixels of images [b, 3, h, w] in [0, 1], each in memory of its own: somebody may take one late. Nothing waits
    for the device until they are wanted."""
    pixels = to_bytes(images)
    if pixels.device.type != "cuda":
        return [_on_host(p.cpu().numpy().copy()) for p in pixels]
    hosts = [torch.empty(p.shape, dtype=torch.uint8, pin_memory=True) for p in pixels]
    for host, p in zip(hosts, pixels, strict=True):
        host.copy_(p, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(pixels.device))
    return [_behind(copied, host) for host in hosts]


def _on_host(pixels: np.ndarray) -> Pixels:
    return lambda: pixels


def _behind(copied: torch.cuda.Event, pixels: Tensor) -> Pixels:
    def wait() -> np.ndarray:
        copied.synchronize()
        return pixels.numpy()

    return wait
