"""An image while it is made: after which scales it is shown, and its pixels on the way to the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.serve.jobs import ALL, Pixels
from nextscale.tokenizers.base import ImageTokenizer

FIRST_SHOWN = 4  # scales before it, counted from 1, show nothing that a person could recognize


def preview_scales(wanted: int | str, seconds: Sequence[float]) -> tuple[int, ...]:
    """The scales (from 1) after which an image is shown, evenly spaced in time; `seconds` that each is expected to
    take. None is of the last scale, which is the image itself; of a number of previews none is before the fourth."""
    scales = len(seconds)
    if wanted == ALL:
        return tuple(range(1, scales))
    ends = np.cumsum(seconds)
    last = max((s for s in range(1, scales + 1) if seconds[s - 1] > 0), default=scales)  # the others are left out
    candidates = range(FIRST_SHOWN, last)
    number = min(int(wanted), len(candidates))
    moments = [ends[-1] * n / (number + 1) for n in range(1, number + 1)]

    def distance(shown: tuple[int, ...]) -> float:
        return sum(abs(ends[s - 1] - moment) for s, moment in zip(shown, moments, strict=True))

    return min(itertools.combinations(candidates, number), key=distance)


@torch.inference_mode()
def decode_preview(tokenizer: ImageTokenizer, features: Tensor, small: bool) -> Tensor:
    """Decode maps [b, d, H, W] to images in [-1, 1]; small ones have half the side and take a quarter of the time."""
    if small:
        h, w = features.shape[2:]
        features = F.interpolate(features, size=((h + 1) // 2, (w + 1) // 2), mode="area")
    return tokenizer.decode(features.float())


@torch.inference_mode()
def pixels_of(images: Tensor) -> list[Pixels]:
    """The pixels of images [b, 3, h, w] in [-1, 1], rounded as finished images are. Nothing waits for the device until
    somebody wants them."""
    pixels = images.float().add(1).div(2).mul(255).clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()
    if pixels.device.type != "cuda":
        return [_on_host(p.cpu().numpy()) for p in pixels]
    host = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(pixels, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(pixels.device))
    return [_behind(copied, h) for h in host]


def _on_host(pixels: np.ndarray) -> Pixels:
    return lambda: pixels


def _behind(copied: torch.cuda.Event, pixels: Tensor) -> Pixels:
    def wait() -> np.ndarray:
        copied.synchronize()
        return pixels.numpy()

    return wait
