"""One prompt made by several methods: seconds, counts, and how far each image is from the plain one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nextscale.engine.output import Output
from nextscale.io.images import from_pil
from nextscale.methods.base import Method
from nextscale.methods.naming import PLAIN
from nextscale.pipeline import Pipeline
from nextscale.research.evaluate.features import perceptual, why_missing
from nextscale.research.evaluate.psnr import psnr
from nextscale.research.evaluate.ssim import ssim


@dataclass(frozen=True)
class MethodResult:
    """The output of one method for the prompt, and its measures."""

    name: str
    output: Output
    seconds: float
    ratio: float  # seconds of the plain run over these
    tokens: int  # computed, summed over layers and guidance rows
    share: float  # of the plain run's tokens
    psnr: float
    ssim: float
    perceptual: float | None  # None: its network is not installed
    same: bool  # as the plain image, pixel by pixel

    def row(self) -> dict[str, Any]:
        values = {k: v for k, v in vars(self).items() if k != "output"}
        return {**values, "method": self.output.trace.header["method"]}


@contextlib.contextmanager
def warnings_once() -> Iterator[None]:
    """Log each warning about a prompt or size once, however many calls repeat it."""
    seen = set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        known = len(seen)
        seen.add(record.getMessage())
        return len(seen) > known

    loggers = [logging.getLogger(name) for name in ("nextscale.pipeline", "nextscale.text.words")]
    for logger in loggers:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_new)


def require_start(pipe: Pipeline, methods: Mapping[str, Method | None], **size: Any) -> None:
    """Raise what a method has against this model or schedule, before anything is computed."""
    schedule = pipe.schedule(**size)
    context = pipe.model.policy_context(1, schedule, pipe.model.sampling(len(schedule)))
    for method in methods.values():
        if method is not None:
            method.start(context)


def compare_methods(
    pipe: Pipeline, prompt: str | int, methods: Mapping[str, Method | None], seed: int = 0, **size: Any
) -> list[MethodResult]:
    """Run plainly, then with every method, all with the same seed, hence the same random number for every cell."""
    methods = {PLAIN: None, **methods}
    require_start(pipe, methods, **size)
    _warm_up(pipe, prompt, methods, seed, **size)
    outputs = {name: pipe(prompt, seed=seed, method=method, **size) for name, method in methods.items()}
    plain = outputs[PLAIN]
    return [_result(name, output, plain) for name, output in outputs.items()]


def _warm_up(pipe: Pipeline, prompt: str | int, methods: Mapping[str, Method | None], seed: int, **size: Any) -> None:
    """Run without counting. On a GPU every method has kernels of its own to load; a CPU only fills its caches,
    for which one run will do, and a reduced one is shorter."""
    warmed = list(methods.values())
    for method in warmed if pipe.device.type == "cuda" else warmed[-1:]:
        pipe(prompt, seed=seed, method=method, **size)


def _result(name: str, output: Output, plain: Output) -> MethodResult:
    a, b = from_pil(plain.images[:1]), from_pil(output.images[:1])
    traced = output.trace.to_dict()["images"][0]
    seconds = output.trace.seconds["total"]
    return MethodResult(
        name,
        output,
        seconds=seconds,
        ratio=plain.trace.seconds["total"] / seconds,
        tokens=traced["row_tokens_computed"],
        share=traced["row_tokens_computed"] / traced["row_tokens_full"],
        psnr=float(psnr(a, b)),
        ssim=float(ssim(a, b)),
        perceptual=None if why_missing() else float(perceptual(a.add(1).div(2), b.add(1).div(2))),
        same=torch.equal(a, b),
    )
