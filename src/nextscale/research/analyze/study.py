"""What the figures of one model and one prompt are made from; nothing is run that no figure asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from nextscale.engine.output import Output
from nextscale.errors import NextscaleError
from nextscale.methods import NOVA, FastVAR, Method, SparseVAR, ToProVAR, Truncate
from nextscale.methods.base import read_stored
from nextscale.methods.compose import Compose
from nextscale.methods.naming import parse_method
from nextscale.methods.package_data import stored, stored_names
from nextscale.pipeline import Pipeline
from nextscale.research.analyze.band import Band, CategorizedPrompt, measure_band
from nextscale.research.analyze.runs import require_start
from nextscale.research.analyze.style import quoted
from nextscale.research.analyze.watch import Watched, watch
from nextscale.research.prompt_checks import problem

SELECTING = (NOVA, ToProVAR, SparseVAR, FastVAR)


@dataclasses.dataclass
class Study:
    pipe: Pipeline
    prompt: str | int
    seed: int = 0
    prompts: Sequence[CategorizedPrompt] = ()  # the prompts of the band; none: only `prompt`
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
        if self.prompts:
            return measure_band(self.pipe, self.prompts, self.seed, **self.size)
        run = self.watched
        conditional, guided = (np.array([[m.mean() for m in maps]]) for maps in (run.conditional, run.guided))
        return Band(run.model, [CategorizedPrompt(self.prompt)], self.seed, conditional, guided)

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
