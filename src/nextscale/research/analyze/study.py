"""What the figures of one model and one prompt are made from; nothing is run that no figure asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nextscale.engine.output import Output
from nextscale.errors import NextscaleError
from nextscale.methods import NOVA, FastVAR, Method, SparseVAR, ToProVAR, Truncate
from nextscale.methods.base import read_stored
from nextscale.methods.compose import Compose
from nextscale.methods.naming import parse_method
from nextscale.methods.package_data import stored, stored_names
from nextscale.pipeline import Pipeline
from nextscale.research.analyze.band import BATCH, Band, CategorizedPrompt, measure_band, with_seeds
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.runs import require_start
from nextscale.research.analyze.style import quoted
from nextscale.research.analyze.watch import Watched, watch
from nextscale.research.evaluate.psnr import psnr
from nextscale.research.evaluate.ssim import ssim
from nextscale.research.prompt_checks import problem

SELECTING = (NOVA, ToProVAR, SparseVAR, FastVAR)


class Quality(NamedTuple):
    """Means over images."""

    ssim: float  # to the plain image
    psnr: float
    share: float  # of the tokens that were computed

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 5) for name, value in self._asdict().items()}


@dataclasses.dataclass
class Study:
    pipe: Pipeline
    prompt: str | int
    seed: int = 0
    prompts: Sequence[CategorizedPrompt] = ()  # what many images are made of; none: only `prompt`
    seeds: int = 1  # images of each of these
    methods: dict[str, Method | None] | None = None
    size: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.methods is None:
            self.methods = default_methods(self.pipe)

    def setting(self, cls: type[Any]) -> Any:
        """The settings of a method: as asked for, or else the default ones."""
        for method in (*(self.methods or {}).values(), *default_methods(self.pipe).values()):
            for part in method.parts if isinstance(method, Compose) else (method,):
                if isinstance(part, cls):
                    return part
        return cls()

    def check(self, methods: bool, nova: bool) -> None:
        """Complain before anything is computed: of methods that do not fit the schedule, of unreadable prompts."""
        wanted: dict[str, Method | None] = dict(self.methods or {}) if methods else {}
        if nova:
            wanted["its settings"] = self.setting(NOVA)
        require_start(self.pipe, wanted, **self.size)
        for prompt in (self.prompt, *(p.prompt for p in self.prompts)):
            if reason := problem(self.pipe, prompt):
                raise NextscaleError(f"{quoted(prompt)}: {reason}")

    @cached_property
    def watched(self) -> Watched:
        return watch(self.pipe, self.prompt, self.seed, self.setting(ToProVAR).representative, **self.size)

    @cached_property
    def band(self) -> Band:
        if self.prompts or self.seeds > 1:
            return measure_band(self.pipe, self.asked, self.seed, self.seeds, **self.size)
        run = self.watched
        conditional, guided = (np.array([[m.mean() for m in maps]]) for maps in (run.conditional, run.guided))
        return Band(run.model, self.asked, [self.seed], conditional, guided)

    @property
    def asked(self) -> list[CategorizedPrompt]:
        return list(self.prompts) or [CategorizedPrompt(self.prompt)]

    @property
    def images(self) -> list[tuple[CategorizedPrompt, int]]:
        """The prompt and the seed of every image."""
        return list(zip(*with_seeds(self.asked, self.seed, self.seeds), strict=True))

    def calls(self) -> Iterator[dict[str, Any]]:
        """The arguments of the calls that make all images."""
        for start in range(0, len(self.images), BATCH):
            some = self.images[start : start + BATCH]
            yield {"prompt": [p.prompt for p, _ in some], "seed": [seed for _, seed in some], **self.size}

    @cached_property
    def plain(self) -> list[Tensor]:
        """The plain images of every call, [B, 3, H, W] in [0, 1]."""
        return [self.pipe(**call, output_type="pt").images.cpu() for call in self.calls()]

    def quality(self, method: Method) -> Quality:
        """Make all images by a method, and compare them with the plain ones."""
        found: list[tuple[float, float, float]] = []
        for call, plain in zip(self.calls(), self.plain, strict=True):
            out = self.pipe(**call, method=method, output_type="pt")
            made = out.images.cpu()
            shares = [out.trace.share(image) for image in range(len(made))]
            found += zip(ssim(made, plain, 1.0).tolist(), psnr(made, plain, 1.0).tolist(), shares, strict=True)
        return Quality(*(sum(values) / len(values) for values in zip(*found, strict=True)))

    def about(self) -> Data:
        """What the data of figures of many images begins with."""
        return {
            "model": self.pipe.spec.name,
            "prompts": [p.prompt for p, _ in self.images],
            "seeds": [seed for _, seed in self.images],
            "grids": [list(g) for g in self.pipe.schedule(**self.size).grids],
        }

    @cached_property
    def outputs(self) -> dict[str, Output]:
        if not self.methods:
            raise NextscaleError("no method was named, so there is nothing kept to show")
        return {
            name: self.pipe(self.prompt, seed=self.seed, method=method, **self.size)
            for name, method in self.methods.items()
        }


def default_methods(pipe: Pipeline) -> dict[str, Method | None]:
    """List the methods that select tokens, with the preset of this model or its family, and truncation."""
    found: dict[str, Method | None] = {}
    for cls in SELECTING:
        name = next(iter(_fitting(cls.name, pipe)), None)
        text = cls.name if name is None else f"{cls.name}:{name}"
        found[text] = parse_method(text)
    return {**found, "truncate:1": Truncate(1)}


def _fitting(method: str, pipe: Pipeline) -> list[str]:
    """List the presets for this model, best first: named after it, measured on it, or of its family."""
    name, family = pipe.spec.name, pipe.spec.family
    measured = [n for n in stored_names(method) if read_stored(stored(method, n)).get("measured_on") == name]
    return [n for n in (name, *measured, family) if n in stored_names(method)]
