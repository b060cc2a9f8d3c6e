"""SkipVAR: two features of two previews, and two fitted stages."""

from __future__ import annotations

import numpy as np

from .maths import Margins, Recording, resize


def image_features(new: np.ndarray, old: np.ndarray) -> tuple[float, float]:
    """A: how much the Sobel gradients changed. B: the share of amplitudes outside a disc. Images [3, H, W]."""
    change = np.abs(_gradient(new.mean(0)) - _gradient(old.mean(0))).mean()
    gray = new.mean(0)
    h, w = gray.shape
    amplitude = np.abs(np.fft.fftshift(np.fft.fft2(gray)))
    y, x = np.mgrid[:h, :w]
    far = np.hypot(y - h // 2, x - w // 2) > int(0.4 * min(h, w) / 2)
    return float(change), float(amplitude[far].sum() / (amplitude.sum() + 1e-6))


def _gradient(gray: np.ndarray) -> np.ndarray:
    p = np.pad(gray, 1)
    rows = p[:-2] + 2 * p[1:-1] + p[2:]  # smoothed downwards, [H, W + 2]
    columns = p[:, :-2] + 2 * p[:, 1:-1] + p[:, 2:]
    return np.hypot(rows[:, 2:] - rows[:, :-2], columns[2:] - columns[:-2])


class Skip:
    """One image; `decides` and the answers count scales from 0."""

    def __init__(self, run: Recording, image: int, *, decides: int, preview: tuple[int, int], decision: dict) -> None:
        self.margins = Margins()
        last = len(run.scales)
        # The recorded previews are of all images: the newer map first or not, whatever the maps say.
        self.features = image_features(*(self._preview(run, image, t, preview) for t in (decides, decides - 1)))
        left_out = self._stage(decision["skip"])
        unguided = self._stage(decision["uncond"]) if left_out == 0 and decision.get("uncond") else 0
        self.stop = max(last - left_out, decides + 1)
        self.unguided = max(last - unguided, decides + 1)

    def _preview(self, run: Recording, image: int, t: int, size: tuple[int, int]) -> np.ndarray:
        """The decoded image of the map after scale t, found among the recorded ones by what was decoded."""
        full = run.scales[t].features[image]
        cells = full.reshape(len(full), -1).T
        small = resize(cells, full.shape[1:], size, "bilinear").T.reshape(len(full), *size)
        for maps, images in run.previews:
            if maps.shape[2:] == size and np.abs(maps[image] - small).max() < 1e-4:
                return images[image]
        raise AssertionError(f"no preview of scale {t + 1} was decoded")

    def _stage(self, stage: dict) -> int:
        n = len(stage["mean"])
        z = (np.array(self.features[:n]) - stage["mean"]) / stage["scale"]
        scores = np.array(stage["coef"]) @ z + stage["intercept"]
        ordered = np.sort(scores)
        self.margins.of(ordered[-1] - ordered[-2] if len(ordered) > 1 else np.inf)
        return stage["classes"][int(np.argmax(scores))]
