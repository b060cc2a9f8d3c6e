"""Comparing our models with recorded tensors of the official code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.checkpoints.files import open_states
from nextscale.engine.callback import ScaleEnd
from nextscale.engine.loop import generate
from nextscale.engine.model import Model
from nextscale.engine.request import Request
from nextscale.engine.rng import NoiseSource
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Schedule
from nextscale.engine.trace import TracedImage
from nextscale.errors import NextscaleError, choices
from nextscale.io import reading
from nextscale.methods.policy import PlainPolicy
from nextscale.models.registry import Defaults, ModelSpec
from nextscale.runtime.eager import Eager

TOLERANCE = 1e-3
# Smoothed sampling divides by a temperature down to 0.0135, which turns rounding noise of the logits into
# differences of the map; left alone, these grow from scale to scale. (The official code, run on another CPU than
# the one that recorded it, is off by 5e-3 at the last of 6 scales.) So each scale starts from the recorded map.
SMOOTHED = 3e-3


@dataclass
class Check:
    """One quantity of one run over all its scales. Integers must be equal, floats within the tolerance."""

    quantity: str
    tolerance: float  # 0 = must be equal: tokens and bits
    error: float = 0.0  # largest absolute difference
    tensors: int = 0
    first_off: str = ""  # the first tensor that differs too much

    @property
    def ok(self) -> bool:
        return self.tensors > 0 and not self.first_off

    def add(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        self.tensors += 1
        ours = ours.cpu()
        if ours.shape != theirs.shape:
            self.error = float("inf")
            self.first_off = self.first_off or f"{name}: shape {list(ours.shape)}, recorded {list(theirs.shape)}"
            return
        difference = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
        if not self.error > difference:  # so that NaN is the largest
            self.error = difference
        if not difference <= self.tolerance and not self.first_off:  # NaN is off, too
            self.first_off = name


@dataclass
class Recording:
    """The tensors of a case and which of them have been compared."""

    tensors: Mapping[str, Tensor]
    used: set[str] = field(default_factory=set)
    checks: dict[str, Check] = field(default_factory=dict)

    def get(self, name: str) -> Tensor:
        """Take a tensor as an input."""
        if name not in self.tensors:
            raise NextscaleError(f"the case lacks the recorded tensor {name!r}")
        self.used.add(name)
        return self.tensors[name]

    def compare(
        self, name: str, ours: Tensor, tolerance: float = TOLERANCE, rows: bool = False, required: bool = False
    ) -> None:
        """Compare with the tensor of that name, if it was recorded; `rows`: over the rows that both have."""
        theirs = self.get(name) if required else self.tensors.get(name)
        if theirs is None:
            return
        self.used.add(name)
        if rows:
            both = min(len(ours), len(theirs))
            ours, theirs = ours[:both], theirs[:both]
        head, _, last = name.rpartition(".")
        quantity = head if last.isdigit() else name
        if quantity not in self.checks:
            self.checks[quantity] = Check(quantity, tolerance)
        self.checks[quantity].add(name, ours, theirs)

    @property
    def unused(self) -> list[str]:
        return [name for name in self.tensors if name not in self.used]


@dataclass(frozen=True)
class RecordedRun:
    """One sampling run of a case."""

    name: str
    condition: Any
    images: int
    sampling: Sampling
    noise: NoiseSource
    tokens_name: str  # "tokens" or "bits"
    finish: Callable[[Tensor], dict[str, tuple[Tensor, float]]]  # decoder output -> what was recorded of it
    tolerance: float = TOLERANCE


@dataclass
class Case:
    folder: Path
    backbone: Any
    tokenizer: Any
    schedule: Schedule
    runs: list[RecordedRun]
    recorded: Recording
    images: dict[str, list[Tensor]] = field(default_factory=dict)  # per run, after each scale [B, 3, H, W]

    def play(self, run: RecordedRun, keep_images: bool = False) -> list[Tensor]:
        """Run it, comparing scale by scale; return the maps after each scale."""
        maps: list[Tensor] = []

        def compare(end: ScaleEnd) -> Tensor | None:
            def with_record(what: str, ours: Tensor, tolerance: float = run.tolerance, **options: bool) -> None:
                self.recorded.compare(f"{run.name}.{what}.{end.scale.index}", ours, tolerance, **options)

            # Both branches run here until the last guided scale; the original may have run more or fewer rows.
            with_record("hidden", end.hidden, rows=True)
            with_record("logits_raw", end.raw_logits.flatten(2), rows=True)
            with_record("logits", end.logits)
            with_record(run.tokens_name, end.tokens, tolerance=0, required=True)
            with_record("f_hat", end.features)
            if keep_images:
                self.images.setdefault(run.name, []).append(end.decode())
            maps.append(end.features)
            theirs = self.recorded.tensors.get(f"{run.name}.f_hat.{end.scale.index}")
            return theirs.to(end.features.device) if run.sampling.smooth and theirs is not None else None

        spec = ModelSpec("recorded", "", self.backbone.config, self.tokenizer.config, Defaults(0.0), "", "", ())
        model = Model(self.backbone, self.tokenizer, spec)
        who = [TracedImage(None)] * run.images
        request = Request(run.images, self.schedule, run.sampling, run.noise, who, run.condition, callback=compare)
        policy = PlainPolicy(model.policy_context(run.images, self.schedule, run.sampling))
        generate(request, model, policy, Eager())
        for name, (ours, allowed) in run.finish(self.tokenizer.decode(maps[-1])).items():
            self.recorded.compare(f"{run.name}.{name}", ours, tolerance=allowed)
        return maps


def read_json(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise NextscaleError(f"{path.parent} is no recorded case: it has no {path.name}")
    content = reading.read_json(path, "readable JSON")
    if not isinstance(content, dict):
        raise NextscaleError(f"{path} must hold a JSON object")
    return content


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    if not isinstance(value, dict):
        raise NextscaleError(f"config.json needs an object {name!r}")
    return value


def generator_of(seed: Any, where: str) -> torch.Generator:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise NextscaleError(f"{where} has g_seed {seed!r}; a run can be repeated only with a whole number")
    return torch.Generator().manual_seed(seed)


class Arguments:
    """The arguments of one section of a case: each must be known, and is taken once."""

    def __init__(self, where: str, values: Mapping[str, Any], without_effect: Iterable[str] = ()) -> None:
        self.where, self.values = where, dict(values)
        self.without_effect = set(without_effect)

    def take(self, name: str, *default: Any) -> Any:
        if name not in self.values and not default:
            raise NextscaleError(f"{self.where} lacks the argument {name!r}")
        return self.values.pop(name, *default)

    def only(self, name: str, value: Any) -> None:
        """Require the one supported value of an argument of the official code."""
        found = self.values.pop(name, value)
        if found != value:
            raise NextscaleError(f"{self.where} has {name} = {found!r}, but only {value!r} is supported")

    def done(self) -> None:
        if unknown := [name for name in self.values if name not in self.without_effect]:
            raise NextscaleError(f"{self.where} has the unknown argument {choices(map(repr, unknown))}")


def tensors_of(path: Path) -> dict[str, Tensor]:
    cond = open_states(path)[0]
    return cond.tensors(list(cond.infos))
