"""A request: what was asked for, read and checked in one place. It knows no pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nextscale.engine.callback import Callback
from nextscale.engine.model import Model
from nextscale.engine.prompts import Prompts, read_prompts
from nextscale.engine.rng import NoiseSource, PerImageNoise, read_noise
from nextscale.engine.sampling import Sampling, read_forced
from nextscale.engine.schedule import Schedule
from nextscale.engine.trace import TracedImage
from nextscale.io.arguments import read_choice, require_callback
from nextscale.io.images import OUTPUT_TYPES
from nextscale.methods.base import Method
from nextscale.methods.naming import read_method
from nextscale.models.base import Backbone

if TYPE_CHECKING:
    from nextscale.runtime.base import Executor


@dataclass(frozen=True)
class Request:
    images: int
    schedule: Schedule
    sampling: Sampling
    noise: NoiseSource
    traced: list[TracedImage]  # who each image is
    condition: Any = None  # the prompts, encoded
    padded_batch: int = 0  # rows of the batch that is run; those behind `images` are padding
    forced_tokens: Sequence[Tensor] = ()
    callback: Callback | None = None
    advance: Callable[[int], None] = lambda scales: None  # of a progress bar
    prompts: Prompts | None = None
    method: Method | None = None
    output_type: str = "pil"

    def __post_init__(self) -> None:
        object.__setattr__(self, "padded_batch", max(self.padded_batch, self.images))

    @property
    def guided(self) -> bool:
        return self.sampling.guided_until > 0

    def padded_for(self, executor: Executor, backbone: Backbone) -> Request:
        """Pad the batch to a size that the executor is warmed up for."""
        rows = executor.padded_batch(self.images, backbone, self.noise, self.forced_tokens)
        noise = self.noise.padded_to(rows) if isinstance(self.noise, PerImageNoise) else self.noise
        return dataclasses.replace(self, padded_batch=rows, noise=noise)

    def read_condition(self, backbone: Backbone) -> tuple[Tensor | None, ...]:
        """Read the condition as tensors of an entry per row; padding repeats the last image's."""
        inputs, images = backbone.read(self.condition, self.guided), self.images
        if self.padded_batch == images:
            return inputs
        row = [min(n, images - 1) for n in range(self.padded_batch)]

        def pad(rows: Tensor) -> Tensor:
            index = [first + r for first in range(0, len(rows), images) for r in row]
            return rows[index]

        return tuple(None if t is None else pad(t) for t in inputs)


def read_request(
    model: Model,
    admit: Callable[[Prompts, Schedule, bool], None],
    *,
    prompt: Any,
    negative_prompt: Any,
    num_images_per_prompt: Any,
    seed: Any,
    generator: Any,
    height: Any,
    width: Any,
    aspect_ratio: Any,
    pixel_budget: Any,
    method: Any,
    force_tokens: Any,
    callback_on_scale_end: Any,
    output_type: Any,
    prompt_embeds: Any,
    negative_prompt_embeds: Any,
    **sampling: Any,
) -> Request:
    """Check everything that a call was given; prompts are not encoded yet.

    `admit` refuses more images than there is memory for, before anything is made for each of them.
    """
    read_choice(output_type, "output_type", OUTPUT_TYPES)
    method = read_method(method, model.spec.name)
    if callback_on_scale_end is not None:
        require_callback(callback_on_scale_end, "callback_on_scale_end", "a ScaleEnd")
    schedule = model.schedule(height, width, aspect_ratio, pixel_budget)
    embeds = prompt_embeds, negative_prompt_embeds
    prompts = read_prompts(
        model.backbone, model.spec.name, prompt, negative_prompt, *embeds, repeat=num_images_per_prompt
    )
    settings = model.sampling(len(schedule), **sampling)
    admit(prompts, schedule, settings.guided_until > 0)
    noise, seeds = read_noise(seed, generator, prompts.images, model.device)
    forced = read_forced(() if force_tokens is None else force_tokens, schedule, prompts.images, model.backbone)
    return Request(
        prompts.images,
        schedule,
        settings,
        noise,
        prompts.traced(seeds),
        forced_tokens=forced,
        callback=callback_on_scale_end,
        prompts=prompts,
        method=method,
        output_type=output_type,
    )
