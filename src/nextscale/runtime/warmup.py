"""Warm-up: make all that calls of some shapes will need, before the first of them comes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.io.arguments import read_count, read_list, short_repr
from nextscale.io.progress import bar
from nextscale.methods.base import Method
from nextscale.methods.naming import format_method, read_method
from nextscale.methods.policy import PlainPolicy, Policy, PolicyContext, ScalePlan
from nextscale.runtime.eager import Eager

if TYPE_CHECKING:
    from nextscale.pipeline import Pipeline

Size = dict[str, Any]  # arguments of a call


@dataclass(frozen=True)
class WarmupMethod(Method):
    """Another method, with decisions that were made beforehand."""

    name, summary = "warm-up", "Another method, with decisions that were made beforehand."

    like: Method | None = None
    number: int = 0  # of the call: see `Capabilities.warmup_calls`
    last_inactive: bool = False  # the last image never runs

    def start(self, context: PolicyContext) -> Policy:
        context = dataclasses.replace(context, warmup=self.number)
        policy = PlainPolicy(context) if self.like is None else self.like.begin(context)
        if self.last_inactive:
            plan_all = policy.plan_scale

            def plan_scale(scale: Scale) -> ScalePlan:
                plan = plan_all(scale)
                return plan._replace(actions=(*plan.actions[: context.images - 1], "stop"))

            policy.plan_scale = plan_scale  # type: ignore[method-assign]
        return policy

    def to_dict(self) -> dict[str, Any]:
        return {"name": "none", "fields": {}} if self.like is None else self.like.to_dict()


@dataclass(frozen=True)
class CallShape:
    """What graphs are captured for."""

    size: Size
    method: Method | None
    images: int
    text: int | None  # tokens of a prompt

    def __str__(self) -> str:
        what = [f"{k} {v}" for k, v in self.size.items()] or ["the model's own size"]
        method = "no method" if self.method is None else format_method(self.method)
        images = "1 image" if self.images == 1 else f"{self.images} images"
        return f"{images}, {', '.join(what)}, {method}"


def warm_up(
    pipe: Pipeline,
    sizes: Sequence[Any],
    methods: Sequence[Any],
    batches: Sequence[int],
    text_tokens: int,
    callbacks: bool,
    options: dict[str, Any],
) -> int:
    """Call the pipeline with every shape once; return how many scales were captured."""
    chosen = [read_method(m, pipe.spec.name) for m in read_list(methods, "methods", "a list of methods")]
    numbers = [read_count(n, "batches", 1) for n in read_list(batches, "batches", "a list of whole numbers")]
    found = [read_size(size) for size in read_list(sizes, "sizes", "a list of sizes")]
    texts = text_lengths(pipe, read_count(text_tokens, "text_tokens", 1))
    shapes = [CallShape(*shape) for shape in itertools.product(found, chosen, dict.fromkeys(numbers), texts)]
    # The largest first: the others fit into the memory that it needs.
    shapes.sort(key=lambda s: (s.images * pipe.schedule(**s.size).tokens, s.method is None), reverse=True)
    if pipe.device.type == "cpu" and type(pipe.executor) is Eager:  # nothing is compiled or captured there
        return 0
    before = pipe.captured
    quiet = copy.copy(pipe)
    quiet.progress_bar = False
    pipe.executor.warming_up = True
    try:
        with bar("warm-up", len(shapes), pipe.progress_bar) as advance:
            for shape in shapes:
                for watched in [False, True] if callbacks else [False]:
                    warm_up_shape(quiet, shape, watched, options)
                advance(1)
    finally:
        pipe.executor.warming_up = False
    pipe.executor.on_warmed_up(numbers)
    return pipe.captured - before


def warm_up_shape(pipe: Pipeline, shape: CallShape, watched: bool, options: dict[str, Any]) -> None:
    arguments = {**shape.size, **options, **prompt_of(pipe, shape), "seed": 0, "output_type": "latent"}
    if watched:
        arguments["callback_on_scale_end"] = lambda end: None
    calls = 1
    if shape.method is not None:
        schedule = pipe.schedule(**shape.size)
        sampling = pipe.model.sampling(len(schedule), options.get("guidance_scale"))
        context = pipe.model.policy_context(shape.images, schedule, sampling)
        calls = shape.method.begin(context).capabilities.warmup_calls
    # Rows are inactive where a batch is padded, or an image stops or loses guidance before the others.
    inactive = [False, True] if shape.images > 1 and pipe.executor.supports_inactive_rows(pipe.backbone) else [False]
    for last_inactive, number in itertools.product(inactive, range(calls)):
        made = pipe(method=WarmupMethod(shape.method, number, last_inactive), **arguments)
        if made.trace.to_dict()["runtime"] != pipe.executor.name:  # made all the same, but nothing was kept
            smaller = "a smaller size" + (f" or {shape.images // 2} at once" if shape.images > 1 else "")
            raise NextscaleError(f"the GPU's memory is too small to keep graphs for {shape}; allowed: {smaller}")


def prompt_of(pipe: Pipeline, shape: CallShape) -> dict[str, Any]:
    if shape.text is None:
        return {"prompt": [0] * shape.images}
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(shape.text, pipe.backbone.config.text_dim, generator=generator)
    return {"prompt_embeds": [features] * shape.images}


def text_lengths(pipe: Pipeline, longest: int) -> list[int | None]:
    """List the lengths that texts of up to `longest` tokens are padded to."""
    if pipe.backbone.prompts != "text":
        return [None]
    limit = pipe.backbone.config.text_length
    if pipe.backbone.context:  # texts are always padded to it
        return [min(longest, limit)]
    lengths = [n for n in (*pipe.executor.text_buckets, limit) if n <= limit]
    return [n for shorter, n in zip([0, *lengths], lengths, strict=False) if shorter < min(longest, limit)]


def read_size(size: Any) -> Size:
    """Read None, "0.25M", (height, width), or the arguments of a call by name."""
    if size is None:
        return {}
    if isinstance(size, str):
        return {"pixel_budget": size}
    if isinstance(size, dict):
        unknown = [name for name in size if name not in ("height", "width", "aspect_ratio", "pixel_budget")]
        if unknown:
            raise NextscaleError(
                f"a size has no {unknown[0]!r}; allowed: height and width, or aspect_ratio and pixel_budget"
            )
        return size
    if isinstance(size, Iterable) and len(both := list(size)) == 2:
        return {"height": both[0], "width": both[1]}
    raise NextscaleError(f'a size must be None, (height, width), "1M" or a dict of them, not {short_repr(size)}')
