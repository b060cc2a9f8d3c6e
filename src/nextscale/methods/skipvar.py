"""SkipVAR: two previews tell, per image, how many of the last scales can be left out or run without guidance."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError, choices
from nextscale.io.reading import read_json
from nextscale.methods.base import Method
from nextscale.methods.package_data import stored, stored_names
from nextscale.methods.policy import HOST_ONLY, Activation, Explanation, Policy, PolicyContext, ScaleContext, ScalePlan


@dataclass(frozen=True)
class Stage:
    """A fitted choice among numbers of scales: standardised features, one linear score per class."""

    classes: tuple[int, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    coef: tuple[tuple[float, ...], ...]
    intercept: tuple[float, ...]

    def __post_init__(self) -> None:
        n, features = len(self.classes), len(self.mean)
        shapes = [len(self.scale) == features, len(self.coef) == len(self.intercept) == n]
        if not n or not all(shapes) or any(len(row) != features for row in self.coef):
            raise ValueError("classes, coef, intercept, mean and scale do not fit together")

    def __call__(self, features: list[float]) -> int:
        z = [(f - m) / s for f, m, s in zip(features, self.mean, self.scale, strict=True)]
        scores = [
            b + sum(c * v for c, v in zip(row, z, strict=True))
            for row, b in zip(self.coef, self.intercept, strict=True)
        ]
        return self.classes[scores.index(max(scores))]


@dataclass(frozen=True)
class SkipVAR(Method):
    """The decision is fitted to a model and a target quality; `decision` is the JSON file that holds it."""

    name = "skipvar"
    summary = "Decides from two previews how many last scales to leave out, or to run without guidance."
    paper = "SkipVAR"

    decision: str = ""  # a fitted one: its name in the package, or a file of `nextscale calibrate skipvar`
    at: float = 10 / 13  # share of the schedule after which it is made
    preview: float = 5 / 13  # the scale whose size the previews have

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("at", 0, 1, above=True, below=True)
        self.require("preview", 0, 1, above=True)

    def start(self, context: PolicyContext) -> Policy:
        if not self.decision:
            raise NextscaleError(
                f"skipvar needs a fitted decision: give decision={choices(stored_names('decision'))} or a JSON file"
            )
        return SkipVARPolicy(context, self, *read_decision(stored("decision", self.decision)))


def read_decision(path: Path) -> tuple[Stage, Stage | None]:
    """The two stages: scales to leave out; if none, scales to run without guidance."""
    content = read_json(path, "a fitted decision of skipvar")
    try:
        stages = [_stage(content["skip"]), _stage(content["uncond"]) if content.get("uncond") else None]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NextscaleError(f"{path} is not a fitted decision of skipvar: {error}") from None
    assert stages[0] is not None
    return stages[0], stages[1]


def _stage(content: dict[str, Any]) -> Stage:
    rows = tuple(tuple(float(v) for v in row) for row in content["coef"])
    numbers = {k: tuple(float(v) for v in content[k]) for k in ("mean", "scale", "intercept")}
    return Stage(classes=tuple(int(c) for c in content["classes"]), coef=rows, **numbers)


def gradient_change(new: Tensor, old: Tensor) -> Tensor:
    """Feature A: mean difference of the Sobel magnitudes of two images [B, 3, H, W], per image."""
    return (_sobel(new) - _sobel(old)).abs().mean((1, 2, 3))


def _sobel(images: Tensor) -> Tensor:
    gray = images.float().mean(1, keepdim=True)
    x = gray.new_tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    kernels = torch.stack((x, x.T))[:, None]
    return F.conv2d(gray, kernels, padding=1).square().sum(1, keepdim=True).sqrt()


def high_frequency_share(images: Tensor, radius: float = 0.4) -> Tensor:
    """Feature B: share of the spectrum's amplitude outside a disc around its center, per image [B, 3, H, W]."""
    gray = images.float().mean(1)
    h, w = gray.shape[-2:]
    amplitude = torch.fft.fftshift(torch.fft.fft2(gray), dim=(-2, -1)).abs()
    y = torch.arange(h, device=gray.device)[:, None] - h // 2
    x = torch.arange(w, device=gray.device) - w // 2
    outside = (y * y + x * x).sqrt() > int(radius * min(h, w) / 2)
    return (amplitude * outside).sum((1, 2)) / (amplitude.sum((1, 2)) + 1e-6)


class SkipVARPolicy(Policy):
    def __init__(self, context: PolicyContext, method: SkipVAR, skip: Stage, uncond: Stage | None) -> None:
        super().__init__(context)
        scales = list(context.schedule)
        self.skip, self.uncond = skip, uncond
        self.decides = min(max(round(method.at * len(scales)) - 1, 1), len(scales) - 2)
        self.size = scales[max(round(method.preview * len(scales)) - 1, 0)]
        self.old: Tensor | None = None
        self.features: dict[int, list[float]] = {}
        self.stop_at = [len(scales)] * context.images
        self.unguided_from = [len(scales)] * context.images
        # Two warm-up calls: all scales with guidance, then the last ones without.
        self.capabilities = dataclasses.replace(HOST_ONLY, reads_features=True, warmup_calls=2)

    def plan_scale(self, scale: Scale) -> ScalePlan:
        guided = self.context.sampling.guided_until
        return self.plan(
            scale,
            actions=tuple("stop" if scale.index >= at else "run" for at in self.stop_at),
            guided=tuple(scale.index < min(guided, at) for at in self.unguided_from),
        )

    def on_features(self, features: Tensor, ctx: ScaleContext) -> None:
        if ctx.scale.index == self.decides - 1:
            self.old = features
        elif ctx.scale.index == self.decides:
            self._decide(features, ctx)

    def _decide(self, features: Tensor, ctx: ScaleContext) -> None:
        assert self.old is not None
        new, old = self._preview(features), self._preview(self.old)
        values = torch.stack((gradient_change(new, old), high_frequency_share(new)), dim=1).tolist()
        last = len(self.context.schedule)
        if self.context.warmup is not None:
            self.unguided_from = [self.decides + 1 if self.context.warmup else last] * self.context.images
            return
        for image in ctx.rows.image_ids:
            self.features[image] = values[image]
            left_out = self.skip(values[image][: len(self.skip.mean)])
            self.stop_at[image] = max(last - left_out, self.decides + 1)
            if left_out == 0 and self.uncond is not None:
                free = self.uncond(values[image][: len(self.uncond.mean)])
                self.unguided_from[image] = max(last - free, self.decides + 1)
        self.old = None

    def _preview(self, features: Tensor) -> Tensor:
        """A small decoded image of the map so far."""
        assert self.context.decode is not None
        factor = features.shape[-2] // self.context.schedule.last[0]  # latent cells per token
        size = (self.size.h * factor, self.size.w * factor)
        return self.context.decode(F.interpolate(features, size=size, mode="bilinear"))

    def explain(self, image: int) -> Explanation:
        first = min(self.stop_at[image], self.unguided_from[image]) + 1
        if first > len(self.context.schedule):
            return Explanation(Activation(reason="never"))
        return Explanation(Activation(scale=first, reason="fixed"))
