"""What the figures of one model and one prompt are made from; nothing is run that no figure asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from nextscale.engine.prompts import read_labels
from nextscale.engine.request import Output
from nextscale.errors import NextscaleError
from nextscale.methods import NOVA, FastVAR, Method, SparseVAR, ToProVAR, Truncate
from nextscale.methods.base import read_stored
from nextscale.methods.compose import Compose
from nextscale.methods.naming import parse_method
from nextscale.methods.package_data import stored, stored_names
from nextscale.pipeline import Pipeline
from nextscale.research.analyze.band import Asked, Band, measure_band
from nextscale.research.analyze.runs import require_start
from nextscale.research.analyze.style import quoted
from nextscale.research.analyze.watch import Watched, watch
from nextscale.text.words import WordEncoder

CHOOSING = (NOVA, ToProVAR, SparseVAR, FastVAR)


@dataclasses.dataclass
class Study:
    pipe: Pipeline
    prompt: str | int
    seed: int = 0
    asked: Sequence[Asked] = ()  # the prompts of the band; none: only `prompt`
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
        for prompt in (self.prompt, *(a.prompt for a in self.asked)):
            self._check_prompt(prompt)

    def _check_prompt(self, prompt: str | int) -> None:
        encoder = self.pipe.text_encoder
        try:
            if isinstance(prompt, int):
                read_labels(prompt, self.pipe.backbone.config.classes, 1)
            elif isinstance(encoder, WordEncoder):
                encoder.read(prompt)
        except NextscaleError as error:
            raise NextscaleError(f"{quoted(prompt)}: {error}") from None

    @cached_property
    def watched(self) -> Watched:
        return watch(self.pipe, self.prompt, self.seed, self.setting(ToProVAR).representative, **self.size)

    @cached_property
    def band(self) -> Band:
        if self.asked:
            return measure_band(self.pipe, self.asked, self.seed, **self.size)
        seen = self.watched
        conditional, guided = (np.array([[m.mean() for m in maps]]) for maps in (seen.conditional, seen.guided))
        return Band(seen.model, [Asked(self.prompt)], self.seed, conditional, guided)

    @cached_property
    def outputs(self) -> dict[str, Output]:
        if not self.methods:
            raise NextscaleError("no method was named, so there is nothing kept to show")
        return {
            name: self.pipe(self.prompt, seed=self.seed, method=method, **self.size)
            for name, method in self.methods.items()
        }


def default_methods(pipe: Pipeline) -> dict[str, Method | None]:
    """Those that choose tokens, with what is stored for this model or its family, and truncation."""
    found: dict[str, Method | None] = {}
    for cls in CHOOSING:
        name = next(iter(_fitting(cls.name, pipe)), None)
        text = cls.name if name is None else f"{cls.name}:{name}"
        found[text] = parse_method(text)
    return {**found, "truncate:1": Truncate(1)}


def _fitting(method: str, pipe: Pipeline) -> list[str]:
    """Presets for this model, best first: named after it, measured on it, or of its family."""
    name, family = pipe.spec.name, pipe.spec.family
    measured = [n for n in stored_names(method) if read_stored(stored(method, n)).get("measured_on") == name]
    return [n for n in (name, *measured, family) if n in stored_names(method)]
