"""One prompt made by several methods: seconds, counts, and how far each picture is from the plain one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nextscale.engine.request import Output
from nextscale.io.images import from_pil
from nextscale.methods.base import Method
from nextscale.methods.naming import PLAIN
from nextscale.pipeline import Pipeline
from nextscale.research.evaluate.features import perceptual, why_missing
from nextscale.research.evaluate.psnr import psnr
from nextscale.research.evaluate.ssim import ssim


@dataclass(frozen=True)
class Made:
    """What one method made of the prompt."""

    name: str
    output: Output
    seconds: float
    ratio: float  # seconds of the plain run over these
    tokens: int  # computed, summed over layers and guidance rows
    share: float  # of the plain run's tokens
    psnr: float
    ssim: float
    perceptual: float | None  # None: its network is not installed
    same: bool  # as the plain picture, pixel by pixel

    def row(self) -> dict[str, Any]:
        values = {k: v for k, v in vars(self).items() if k != "output"}
        return {**values, "method": self.output.trace.header["method"]}


@contextlib.contextmanager
def warnings_once() -> Iterator[None]:
    """Many calls with one prompt or size need not repeat what the first one has to say about it."""
    said = set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        known = len(said)
        said.add(record.getMessage())
        return len(said) > known

    speakers = [logging.getLogger(name) for name in ("nextscale.pipeline", "nextscale.text.words")]
    for speaker in speakers:
        speaker.addFilter(is_new)
    try:
        yield
    finally:
        for speaker in speakers:
            speaker.removeFilter(is_new)


def require_start(pipe: Pipeline, methods: Mapping[str, Method | None], **size: Any) -> None:
    """Raise what a method has against this model or schedule, before anything is computed."""
    schedule = pipe.schedule(**size)
    context = pipe.context(1, schedule, pipe.sampling(len(schedule)))
    for method in methods.values():
        if method is not None:
            method.start(context)


def make_all(
    pipe: Pipeline, prompt: str | int, methods: Mapping[str, Method | None], seed: int = 0, **size: Any
) -> list[Made]:
    """The plain run first, then every method, all with the same seed, hence the same random number for every cell."""
    named = {PLAIN: None, **methods}
    require_start(pipe, named, **size)
    _warm_up(pipe, prompt, named, seed, **size)
    outputs = {name: pipe(prompt, seed=seed, method=method, **size) for name, method in named.items()}
    plain = outputs[PLAIN]
    return [_made(name, output, plain) for name, output in outputs.items()]


def _warm_up(pipe: Pipeline, prompt: str | int, named: Mapping[str, Method | None], seed: int, **size: Any) -> None:
    """Runs that are not counted. On a GPU every method has kernels of its own to load; a CPU only fills its caches,
    for which one run will do, and a reduced one is shorter."""
    methods = list(named.values())
    for method in methods if pipe.device.type == "cuda" else methods[-1:]:
        pipe(prompt, seed=seed, method=method, **size)


def _made(name: str, output: Output, plain: Output) -> Made:
    a, b = from_pil(plain.images[:1]), from_pil(output.images[:1])
    told = output.trace.to_dict()["images"][0]
    seconds = output.trace.seconds["total"]
    return Made(
        name,
        output,
        seconds=seconds,
        ratio=plain.trace.seconds["total"] / seconds,
        tokens=told["row_tokens_computed"],
        share=told["row_tokens_computed"] / told["row_tokens_full"],
        psnr=float(psnr(a, b)),
        ssim=float(ssim(a, b)),
        perceptual=None if why_missing() else float(perceptual(a.add(1).div(2), b.add(1).div(2))),
        same=torch.equal(a, b),
    )
