"""A small detector that says what is where in an image of the embedded model, so that images can be graded.

Its weights come with the package; `training/recognizer.py` made them from painted scenes. Styles are not told apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.checkpoints.files import open_states
from nextscale.checkpoints.int8 import dequantized
from nextscale.checkpoints.locate import ASSETS

FOLDER = ASSETS / "recognizer"
POOLING = 2  # pixels per side that become one before anything else
STRIDE = 8  # of the maps, in reduced pixels
THRESHOLD = 0.4  # of the heat map: a center that is well seen has 0.8 or more
MIN_DISTANCE = 0.1  # centers that are nearer, as a share of the side, are one thing
MAX_DETECTIONS = 16  # detections per image


@dataclass(frozen=True)
class Detection:
    name: str
    color: str  # means something for shapes only
    x: float  # of the center, as shares of the side
    y: float
    score: float  # that something is there
    sure: float  # that it is this thing


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # No batch norm: images must not depend on their company.
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


def edges(images: Tensor) -> Tensor:
    """Edges across and down [B, 2, H, W], whatever the colors on their two sides.

    A shape has nothing else, and without them the net knew its color long before it left chance at naming it.
    """
    across = F.pad(images.diff(dim=3), (0, 1, 0, 0)).abs().amax(1, keepdim=True)
    down = F.pad(images.diff(dim=2), (0, 0, 0, 1)).abs().amax(1, keepdim=True)
    return torch.cat((across, down), dim=1).add(1e-3).sqrt()  # a faint edge is an edge too


class Recognizer(nn.Module):
    """A U-Net: down to stride 32, where one cell sees the largest object whole, and up again to stride 8."""

    def __init__(self, classes: Sequence[str], colors: Sequence[str], widths: Sequence[int], features: int) -> None:
        super().__init__()
        self.classes, self.colors = tuple(classes), tuple(colors)
        a, b, c, d = widths
        self.stem = nn.Sequential(
            nn.Conv2d(5, a, 5, stride=2, padding=2), nn.SiLU(), nn.Conv2d(a, a, 3, stride=2, padding=1), Residual(a)
        )

        def down(small: int, large: int) -> nn.Sequential:
            enter = (nn.GroupNorm(8, small), nn.SiLU(), nn.Conv2d(small, large, 3, stride=2, padding=1))
            return nn.Sequential(*enter, Residual(large), Residual(large))

        self.down8, self.down16, self.down32 = down(a, b), down(b, c), down(c, d)
        self.up16, self.mix16 = nn.Conv2d(d, c, 1), Residual(c)
        self.up8, self.side8, self.mix8 = nn.Conv2d(c, features, 1), nn.Conv2d(b, features, 1), Residual(features)
        self.norm = nn.GroupNorm(8, features)
        self.heat = nn.Conv2d(features, 1, 3, padding=1)
        self.what = nn.Sequential(nn.Linear(features, 2 * features), nn.SiLU(), nn.Linear(2 * features, len(classes)))
        self.color = nn.Linear(features, len(colors))
        assert self.heat.bias is not None
        nn.init.constant_(self.heat.bias, -4.0)  # nearly all cells are empty

    def maps(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Pooled images [B, 3, H, W] in [-1, 1] -> logits of centers [B, h, w] and features [B, C, h, w]."""
        at8 = self.down8(self.stem(torch.cat((images, edges(images)), dim=1)))
        at16 = self.down16(at8)
        up = F.interpolate(self.up16(self.down32(at16)), scale_factor=2.0, mode="nearest")
        up = F.interpolate(self.up8(self.mix16(at16 + up)), scale_factor=2.0, mode="nearest")
        features = F.silu(self.norm(self.mix8(self.side8(at8) + up)))
        return self.heat(features)[:, 0], features

    def read(self, features: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of class [B, K, classes] and color [B, K, colors] at the cells [B, K]."""
        chosen = features.flatten(2).gather(2, cells[:, None].expand(-1, features.shape[1], -1)).transpose(1, 2)
        return self.what(chosen), self.color(chosen)

    def forward(self, images: Tensor, cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heat, features = self.maps(images)
        return heat, *self.read(features, cells)

    @torch.no_grad()
    def detect(self, images: Tensor, at_once: int = 64) -> list[list[Detection]]:
        """Detect objects in images [B, 3, H, W] in [-1, 1] of full size; the surest first."""
        return [found for part in images.split(at_once) for found in self._detect(part)]

    def _detect(self, images: Tensor) -> list[list[Detection]]:
        heat, features = self.maps(F.avg_pool2d(images, POOLING))
        h, w = heat.shape[1:]
        score = heat.float().sigmoid()
        peak = score * (score == F.max_pool2d(score[:, None], 5, 1, 2)[:, 0])
        best, cells = peak.flatten(1).topk(min(MAX_DETECTIONS, h * w))
        what, color = self.read(features, cells)
        sure, label = what.float().softmax(-1).max(-1)
        rows = zip(*(t.tolist() for t in (best, cells, label, sure, color.argmax(-1))), strict=True)
        return [self._distinct(list(zip(*row, strict=True)), h, w) for row in rows]

    def _distinct(self, candidates: list[tuple[float, int, int, float, int]], h: int, w: int) -> list[Detection]:
        kept: list[Detection] = []
        for score, cell, label, sure, color in candidates:
            x, y = (cell % w + 0.5) / w, (cell // w + 0.5) / h
            if score >= THRESHOLD and all(math.hypot(x - k.x, y - k.y) >= MIN_DISTANCE for k in kept):
                kept.append(Detection(self.classes[label], self.colors[color], x, y, score, sure))
        return kept


def read_about(folder: Path = FOLDER) -> dict[str, Any]:
    """Names of classes and colors, sizes, and how often it was right on images that it was not trained on."""
    about: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return about


def stored_name(parameter: str) -> str:
    """Name a parameter as the shipped file does, which spells in British English."""
    return parameter.replace("color.", "colour.")


@torch.no_grad()
def load_recognizer(device: torch.device | str = "cpu", folder: Path = FOLDER) -> Recognizer:
    about = read_about(folder)
    recognizer = Recognizer(about["classes"], about["colours"], about["widths"], about["features"])
    tensors = dequantized(open_states(folder / "model.safetensors")[0])
    for name, parameter in recognizer.named_parameters():
        key = stored_name(name)
        parameter.copy_(tensors.tensors([key])[key])
    return recognizer.to(device).eval().requires_grad_(False)
