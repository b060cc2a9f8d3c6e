"""A model with what a server has to know of it: names, sizes, qualities, checks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from nextscale.engine.schedule import INFINITY_GRIDS, PIXEL_BUDGETS, infinity_schedule
from nextscale.errors import NextscaleError, choices
from nextscale.io.devices import Clock, total_memory
from nextscale.methods.auto import AUTO, best_method
from nextscale.methods.base import Method
from nextscale.methods.naming import PLAIN, read_method
from nextscale.models.registry import ModelSpec
from nextscale.pipeline import Pipeline
from nextscale.serve.jobs import ImageJob, InvalidJob
from nextscale.serve.previews import decode_preview
from nextscale.text.words import ENTRY_KINDS, WordEncoder

BUDGETS = tuple(budget for budget in PIXEL_BUDGETS if budget != "4M")  # for the last no model was trained
MAX_PROMPT = 32_000  # characters
MAX_KNOWN = 256  # sizes and methods whose times are remembered
Size = tuple[int, int]  # width, height: the order of the image API


class ServedModel:
    def __init__(self, pipe: Pipeline, name: str | None = None, method: str = AUTO) -> None:
        """`method` is what requests get that name none."""
        self.pipe, self.name = pipe, name or pipe.spec.name
        pipe.progress_bar = False
        model = pipe.spec.name
        self.method = best_method(model) if method == AUTO else method
        read_method(self.method, model)
        self.qualities = {
            "low": best_method(model, "fast"),
            "medium": best_method(model, "balanced"),
            **dict.fromkeys(("auto", "standard", "high"), self.method),
            **dict.fromkeys(("hd", "xhigh", "max"), PLAIN),
        }
        stride, schedule = pipe.tokenizer.stride, pipe.schedule()
        self.stride = stride
        self.default_size: Size = (schedule.last[1] * stride, schedule.last[0] * stride)
        self.trained_sizes, self.sizes = served_sizes(pipe.spec, square=self.default_size, stride=stride)
        self.warm_sizes: list[Size] = [self.default_size]
        self.takes_labels = pipe.backbone.prompts == "label"
        self.clock = Clock(pipe.device)  # of the batch that runs
        self.scale_seconds: dict[Any, list[float]] = {}  # as far as seen: of a size and method
        self.other_bytes = 0  # of models on the same device
        self._images_that_fit: dict[Size, int] = {}

    @classmethod
    def load(cls, source: str | Path, *, name: str | None = None, method: str = AUTO, **options: Any) -> ServedModel:
        """Load what `Pipeline.from_pretrained` loads, with its options."""
        # In a thread that ends: while OpenMP has workers of two threads, on a CPU those of the engine sleep between
        # operations instead of spinning, which costs a twentieth.
        with ThreadPoolExecutor(1) as thread:
            return cls(thread.submit(Pipeline.from_pretrained, source, **options).result(), name, method)

    def method_of(self, quality: str, size: Size) -> str:
        """The method of a quality; the plain run where that method needs more scales than images of a size have."""
        try:
            self.check_method(self.read_method(self.qualities[quality]), size)
        except NextscaleError:
            return PLAIN
        return self.qualities[quality]

    @property
    def vocabulary(self) -> dict[str, list[str]] | None:
        """Phrases by kind, where a model knows certain words only."""
        encoder = self.pipe.text_encoder
        if not isinstance(encoder, WordEncoder):
            return None
        kinds = {kind: encoder.lexicon.of_kind(kind) for kind in ENTRY_KINDS[:-1]}  # filler words mean nothing
        return {kind: [entry.name for entry in entries] for kind, entries in kinds.items() if entries}

    def size_of(self, job: ImageJob) -> Size:
        width, height = self.default_size
        return (width if job.width is None else job.width, height if job.height is None else job.height)

    def batch_key(self, job: ImageJob) -> tuple[Any, ...]:
        """What images of one batch share."""
        method = self.read_method(job.method)
        return self.name, self.size_of(job), job.guidance_scale, method, job.negative_prompt is None

    def check(self, job: ImageJob) -> None:
        """Refuse what can never be made."""
        width, height = size = self.size_of(job)
        if size not in self.sizes:
            allowed = choices(f"{w}x{h}" for w, h in self.sizes)
            raise InvalidJob(f"{self.name} makes no images of size {width}x{height}; allowed: {allowed}", "size")
        if not job.seeds:
            raise InvalidJob("a job needs a seed for each of its images, and has none", "n")
        with blaming("method"):
            self.check_method(self.read_method(job.method), size)
        if isinstance(job.prompt, str):
            self.check_texts(job.prompt, job.negative_prompt)
        sampling = {"negative_prompt": job.negative_prompt, "guidance_scale": job.guidance_scale}
        self.pipe.check(job.prompt, height=height, width=width, **sampling)

    def check_texts(self, prompt: str, negative_prompt: str | None) -> None:
        if not prompt.strip():
            raise InvalidJob("the prompt is empty", "prompt")
        encoder = self.pipe.text_encoder
        for what, text in (("prompt", prompt), ("negative_prompt", negative_prompt or "")):
            if len(text) > MAX_PROMPT:
                raise InvalidJob(f"the {what} has {len(text)} characters; allowed: {MAX_PROMPT}", what)
            if text and hasattr(encoder, "check"):
                try:
                    encoder.check(text)  # type: ignore[union-attr]
                except NextscaleError as error:  # which calls both a prompt, and names a command
                    said = str(error).replace("the prompt", f"the {what}", 1)
                    raise InvalidJob(said.replace("`nextscale words`", f"/v1/models/{self.name}"), what) from None

    def read_method(self, method: Method | str) -> Method | None:
        return read_method(method, self.pipe.spec.name)

    def check_method(self, method: Method | None, size: Size) -> None:
        """Refuse a method that cannot begin with images of a size. The device may be capturing: leave it alone."""
        if method is not None:
            schedule = self.pipe.schedule(size[1], size[0])
            context = self.pipe.model.policy_context(1, schedule, self.pipe.model.sampling(len(schedule)))
            method.begin(dataclasses.replace(context, device=torch.device("cpu")))

    def warnings(self, job: ImageJob) -> list[str]:
        """Sentences about what will not be as the client may expect."""
        found, size, encoder = [], self.size_of(job), self.pipe.text_encoder
        if isinstance(encoder, WordEncoder) and isinstance(job.prompt, str):
            found += encoder.warnings(job.prompt)
            found += [f"negative prompt: {text}" for text in encoder.warnings(job.negative_prompt or "")]
        if size not in self.trained_sizes:
            trained = choices(f"{w}x{h}" for w, h in self.trained_sizes)
            found.append(f"{self.name} was trained for {trained}, so an image of {size[0]}x{size[1]} may look wrong")
        return found

    def images_that_fit(self, size: Size, limit: int) -> int:
        """How many images of a size a batch may have; 0 if not even one fits beside the other models."""
        if size not in self._images_that_fit:
            have = total_memory(self.pipe.device)
            fitting = limit
            while fitting and have is not None and self._bytes_of(size, fitting) > have:
                fitting -= 1
            self._images_that_fit[size] = fitting
        return self._images_that_fit[size]

    def _bytes_of(self, size: Size, images: int) -> int:
        return self.other_bytes + self.pipe.estimate(size[1], size[0], images).total

    @property
    def own_bytes(self) -> int:
        """What the model takes when nothing runs."""
        rest = self.pipe.estimate(self.default_size[1], self.default_size[0])
        return rest.weights + (0 if rest.offload else rest.text_encoder)

    @property
    def sample_prompt(self) -> str:
        return "a red fox in a meadow"

    def warm_up(self, batches: Sequence[int]) -> int:
        """Capture what the default method and the qualities need at the sizes to be warm."""
        captured = 0
        for size in self.warm_sizes:
            methods = {self.method_of(quality, size): None for quality in self.qualities}
            captured += self.pipe.warm_up([size[::-1]], list(methods), batches, callbacks=True)
        self.warm_up_previews(batches)
        return captured

    def warm_up_previews(self, batches: Sequence[int]) -> None:
        """Have a GPU measure the convolutions of previews, which takes longer than a preview."""
        if self.pipe.device.type == "cpu":
            return
        decode = functools.partial(self.pipe.executor.preview, self.pipe.tokenizer)
        for (width, height), images, small in itertools.product(self.warm_sizes, batches, (False, True)):
            maps = self.pipe.tokenizer.empty_features(images, self.pipe.schedule(height, width))
            decode_preview(decode, maps, small)

    def expected_seconds(self, job: ImageJob) -> Sequence[float]:
        """How long each scale takes: as seen before, or else by its tokens."""
        width, height = size = self.size_of(job)
        return self.scale_seconds.get((size, job.method)) or [s.tokens for s in self.pipe.schedule(height, width)]

    def observe_seconds(self, job: ImageJob, seconds: Sequence[float]) -> None:
        """Learn from a run how long its scales take."""
        key = self.size_of(job), job.method
        before = self.scale_seconds.pop(key, seconds)
        while len(self.scale_seconds) >= MAX_KNOWN:  # the oldest goes: anybody may send any method
            del self.scale_seconds[next(iter(self.scale_seconds))]
        self.scale_seconds[key] = [0.8 * b + 0.2 * s for b, s in zip(before, seconds, strict=True)]


def served_sizes(spec: ModelSpec, square: Size, stride: int) -> tuple[list[Size], list[Size]]:
    """Trained sizes, and all that are served: those first."""
    if spec.family != "infinity":  # a model of one size
        return [square], [square]
    table = [(budget, infinity_schedule(ratio, budget).last) for budget in BUDGETS for ratio in INFINITY_GRIDS]
    sizes = {(w * stride, h * stride): budget for budget, (h, w) in table}
    trained = [(w, h) for h, w in spec.sizes] or [s for s, b in sizes.items() if b == spec.pixel_budget] or [square]
    trained.sort(key=lambda s: (s != square, abs(s[0] / s[1] - 1)))
    return trained, list(dict.fromkeys((*trained, *sorted(sizes))))


@contextlib.contextmanager
def blaming(param: str) -> Iterator[None]:
    """Name the field that is to blame."""
    try:
        yield
    except NextscaleError as error:
        raise InvalidJob(str(error), param) from None
