"""Every method on a mid-size random Infinity: tokens, FLOPs, seconds, KV bytes, and the price of its own decisions.

    python benchmarks/methods_cpu.py [--pixels 0.25M] [--model infinity-125m] [METHOD ...]

Random weights: the images are noise, so this table says what is computed and how long it takes, not how good it is.
Each method runs beside the plain run in the same process, after one warm-up; "decisions" is the time inside the
method's own choices (probes, attention entropy, sorting, SVD), as a share of the plain run.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from nextscale import NOVA, DropGuidance, FastVAR, Pipeline, RandomSelection, SparseVAR, ToProVAR, Truncate
from nextscale.cache import kv
from nextscale.checkpoints.families import FAMILIES
from nextscale.engine.state import GenerationState
from nextscale.methods.base import Method
from nextscale.models.registry import MODELS
from nextscale.runtime.base import CallContext
from nextscale.runtime.eager import Eager
from nextscale.testing import randomize

METHODS: dict[str, Method] = {
    "nova": NOVA(),
    "nova, previous": NOVA(probe="previous"),
    "toprovar": ToProVAR(scale_stage=False),
    "sparsevar": SparseVAR(),
    "fastvar": FastVAR(),
    "random like nova": RandomSelection(NOVA()),
    "drop guidance": DropGuidance(8),
    "truncate 1": Truncate(1),
    "truncate 2": Truncate(2),
}


class Stopwatch:
    """Adds up the time inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.timed(getattr(owner, name)))

    def timed(self, function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return wrapped


class Watched(Method):
    """A method whose decisions are timed."""

    name, summary = "watched", ""

    def __init__(self, inner: Method, clock: Stopwatch) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "clock", clock)

    def start(self, context: Any) -> Any:
        policy = self.inner.start(context)
        self.clock.watch(policy, "plan_scale", "select", "finalize", "on_logits")
        return policy

    def to_dict(self) -> dict[str, Any]:
        return self.inner.to_dict()


class Watching(Eager):
    """Knows the run at work, and with it the KV cache."""

    run: GenerationState

    def open(self, call: CallContext, inputs: Any, images: int, guided: bool) -> GenerationState:
        self.run = super().open(call, inputs, images, guided)
        return self.run


def random_pipeline(name: str) -> Pipeline:
    spec = MODELS[name]
    family = FAMILIES[spec.family]
    modules = [family.module(spec.backbone), FAMILIES[str(family.tokenizer)].module(spec.tokenizer)]
    for i, module in enumerate(modules):
        randomize(module, i)
    return Pipeline(*modules, spec, progress_bar=False)


def measure(pipe: Pipeline, options: dict[str, Any], method: Method | None) -> dict[str, Any]:
    clock, original = Stopwatch(), kv.attention_entropy
    kv.attention_entropy = clock.timed(original)
    pipe.executor = executor = Watching()
    size: list[int] = []
    try:
        out = pipe(
            **options,
            method=None if method is None else Watched(method, clock),
            callback_on_scale_end=lambda end: size.append(sum(c.nbytes for c in executor.run.kv)),
        )
    finally:
        kv.attention_entropy = original
    image = out.trace.to_dict()["images"][0]
    return {
        "tokens": image["row_tokens_computed"] / image["row_tokens_full"],
        "flops": image["flops"] / image["flops_full"],
        "seconds": out.trace.seconds["transformer"],
        "kv": max(size) / pipe.backbone.depth,
        "decisions": clock.seconds,
        "from": image["activation"]["scale"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pixels", default="0.25M")
    parser.add_argument("--model", default="infinity-125m")
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    arguments = parser.parse_args()
    pipe = random_pipeline(arguments.model)
    torch.manual_seed(0)  # a method's decisions depend on the prompt
    options = {
        "prompt_embeds": [torch.randn(12, pipe.backbone.config.text_dim)],
        "seed": 0,
        "pixel_budget": arguments.pixels,
        "output_type": "latent",
    }
    measure(pipe, {**options, "pixel_budget": "0.06M"}, None)
    plain = measure(pipe, options, None)
    grid = "x".join(map(str, pipe.schedule(pixel_budget=arguments.pixels).last))
    print(
        f"{arguments.model} (random weights), {grid} tokens, guided, 1 image, float32, CPU with "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print("method            from  row tokens   FLOPs  seconds  speed-up  decisions  KV per layer")
    for name, method in {"plain": None, **{n: METHODS[n] for n in arguments.methods}}.items():
        m = plain if method is None else measure(pipe, options, method)
        print(
            f"{name:<16}  {m['from'] or '-':>4}  {m['tokens']:>10.1%}  {m['flops']:>6.1%}  {m['seconds']:>7.2f}  "
            f"{plain['seconds'] / m['seconds']:>7.2f}x  {m['decisions'] / plain['seconds']:>9.1%}  "
            f"{m['kv'] / 2**20:>8.1f} MiB",
            flush=True,
        )
