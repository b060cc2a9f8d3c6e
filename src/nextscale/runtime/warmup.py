"""Everything that calls of some shapes will need, made before the first of them comes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.io.arguments import read_count, read_list, shown
from nextscale.io.progress import bar
from nextscale.methods.base import Method, Policy, PolicyContext, ScalePlan
from nextscale.methods.naming import format_method
from nextscale.runtime.eager import Eager

if TYPE_CHECKING:
    from nextscale.pipeline import Pipeline

Size = dict[str, Any]  # arguments of a call


@dataclass(frozen=True)
class Rehearsal(Method):
    """A method whose decisions are made beforehand."""

    name = "rehearsal"
    summary = "Another method, with decisions that were made beforehand."

    like: Method | None = None
    number: int = 0
    rests: bool = False  # the last picture, from the first scale on

    def start(self, context: PolicyContext) -> Policy:
        policy = Policy(context) if self.like is None else self.like.begin(context)
        policy.rehearse(self.number)
        if self.rests:
            begin = policy.plan_scale

            def plan_scale(scale: Scale) -> ScalePlan:
                plan = begin(scale)
                return plan._replace(actions=(*plan.actions[: context.images - 1], "stop"))

            policy.plan_scale = plan_scale  # type: ignore[method-assign]
        return policy

    def to_dict(self) -> dict[str, Any]:
        return {"name": "none", "fields": {}} if self.like is None else self.like.to_dict()


@dataclass(frozen=True)
class Shape:
    """Of calls: all that graphs are captured for."""

    size: Size
    method: Method | None
    images: int
    text: int | None  # tokens of a prompt

    def __str__(self) -> str:
        what = [f"{k} {v}" for k, v in self.size.items()] or ["the model's own size"]
        method = "no method" if self.method is None else format_method(self.method)
        pictures = "1 picture" if self.images == 1 else f"{self.images} pictures"
        return f"{pictures}, {', '.join(what)}, {method}"


def warm_up(
    pipe: Pipeline,
    sizes: Sequence[Any],
    methods: Sequence[Any],
    batches: Sequence[int],
    text_tokens: int,
    callbacks: bool,
    options: dict[str, Any],
) -> int:
    """Scales that were captured."""
    from nextscale.pipeline import check_method

    chosen = [check_method(m) for m in read_list(methods, "methods", "a list of methods")]
    numbers = [read_count(n, "batches", 1) for n in read_list(batches, "batches", "a list of whole numbers")]
    found = [read_size(size) for size in read_list(sizes, "sizes", "a list of sizes")]
    texts = lengths_of_texts(pipe, read_count(text_tokens, "text_tokens", 1))
    shapes = [Shape(*shape) for shape in itertools.product(found, chosen, dict.fromkeys(numbers), texts)]
    # The largest first: what it needs is room enough for the others.
    shapes.sort(key=lambda s: (s.images * pipe.schedule(**s.size).tokens, s.method is None), reverse=True)
    if pipe.device.type == "cpu" and type(pipe.executor) is Eager:  # nothing is compiled or captured there
        return 0
    before, ways = pipe.captured, [False, True] if callbacks else [False]
    quiet = copy.copy(pipe)
    quiet.progress_bar = False
    pipe.executor.rehearsing = True
    try:
        with bar("warm-up", len(shapes), pipe.progress_bar) as advance:
            for shape in shapes:
                for watched in ways:
                    rehearse(quiet, shape, watched, options)
                advance(1)
    finally:
        pipe.executor.rehearsing = False
    pipe.executor.warmed(numbers)
    return pipe.captured - before


def rehearse(pipe: Pipeline, shape: Shape, watched: bool, options: dict[str, Any]) -> None:
    more = {**shape.size, **options, **prompt_of(pipe, shape), "seed": 0, "output_type": "latent"}
    if watched:
        more["callback_on_scale_end"] = lambda end: None
    calls = 1
    if shape.method is not None:
        schedule = pipe.schedule(**shape.size)
        context = pipe.context(shape.images, schedule, pipe.sampling(len(schedule), options.get("guidance_scale")))
        calls = shape.method.begin(context).rehearsals
    # Some rows rest where a batch is filled up, or a picture stops or loses guidance before the others.
    resting = [False, True] if shape.images > 1 and pipe.executor.rests(pipe.backbone) else [False]
    for rests, number in itertools.product(resting, range(calls)):
        made = pipe(method=Rehearsal(shape.method, number, rests), **more)
        if made.trace.to_dict()["runtime"] != pipe.executor.name:  # made all the same, but nothing was kept
            smaller = "a smaller size" + (f" or {shape.images // 2} at once" if shape.images > 1 else "")
            raise NextscaleError(f"the GPU's memory is too small to keep graphs for {shape}; allowed: {smaller}")


def prompt_of(pipe: Pipeline, shape: Shape) -> dict[str, Any]:
    if shape.text is None:
        return {"prompt": [0] * shape.images}
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(shape.text, pipe.backbone.config.text_dim, generator=generator)
    return {"prompt_embeds": [features] * shape.images}


def lengths_of_texts(pipe: Pipeline, most: int) -> list[int | None]:
    """One for every shape of text up to `most` tokens."""
    if pipe.backbone.prompts != "text":
        return [None]
    longest = pipe.backbone.config.text_length
    if pipe.backbone.context:  # the text always has all its places
        return [min(most, longest)]
    steps = [s for s in (*pipe.executor.text_slots, longest) if s <= longest]
    return [s for before, s in zip([0, *steps], steps, strict=False) if before < min(most, longest)]


def read_size(size: Any) -> Size:
    """None, "0.25M", (height, width), or the arguments of a call by name."""
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
    raise NextscaleError(f'a size must be None, (height, width), "1M" or a dict of them, not {shown(size)}')
