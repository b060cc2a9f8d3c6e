"""The one object that users hold: a model, ready to make images."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from nextscale.checkpoints import locate, pretrained
from nextscale.checkpoints.load import set_dtype
from nextscale.engine.callback import Callback
from nextscale.engine.memory import Estimate, estimate
from nextscale.engine.model import Model
from nextscale.engine.output import Output, run_request
from nextscale.engine.prompts import Prompts, read_strings
from nextscale.engine.request import read_request
from nextscale.engine.rng import PerImageNoise
from nextscale.engine.schedule import EXTENDED, Schedule, is_far
from nextscale.errors import NextscaleError, choices
from nextscale.io.arguments import (
    is_flag,
    read_choice,
    read_count,
    read_flag,
    read_path,
    read_text,
    short_repr,
)
from nextscale.io.devices import Clock, as_device, as_dtype, dtype_name
from nextscale.io.images import from_pil
from nextscale.io.progress import bar
from nextscale.methods.base import Method
from nextscale.methods.naming import read_method
from nextscale.models.base import Backbone
from nextscale.models.fp8 import check_change, check_quantize, to_fp8
from nextscale.models.offload import onload, to_host
from nextscale.models.registry import EMBEDDED, ModelSpec
from nextscale.runtime.base import Executor
from nextscale.runtime.out_of_memory import with_enough_memory
from nextscale.runtime.registry import check_runtime, make_executor
from nextscale.runtime.warmup import warm_up
from nextscale.text.base import TextEncoder, encoder_nbytes
from nextscale.text.qwen2 import QwenEncoder
from nextscale.text.t5 import T5Encoder
from nextscale.tokenizers.base import ImageTokenizer

logger = logging.getLogger(__name__)

OFFLOADS = ("text",)
MAX_ESTIMATES = 16  # that are kept
ENCODERS = {"infinity": T5Encoder, "hart": QwenEncoder}


class Pipeline:
    def __init__(
        self,
        backbone: Backbone,
        tokenizer: ImageTokenizer,
        spec: ModelSpec,
        text_encoder: TextEncoder | None = None,
        progress_bar: bool | None = None,
        weight_files: Sequence[Path] = (),
        runtime: str = "eager",
        offload: str | None = None,
    ) -> None:
        check_offload(offload)
        check_encoder(text_encoder)
        self.backbone, self.tokenizer, self.spec = backbone, tokenizer, spec
        self.executor = make_executor(runtime, self.device)
        self.text_encoder, self.offload = text_encoder, offload
        if text_encoder is not None and offload is not None:
            to_host(text_encoder)
        self._estimates: dict[Any, Estimate] = {}  # the newest of them
        self._clock: Clock | None = None  # of the call before
        self._known_sizes: set[tuple[int, int]] = set()  # height, width of images that were asked for
        self.progress_bar = progress_bar  # None: only on a terminal
        self.weight_files = tuple(weight_files)  # where the weights were read; empty: they were never in files

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path = EMBEDDED.name,
        *,
        model: str | None = None,
        vae: str | Path | None = None,
        text_encoder: str | Path | TextEncoder | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        progress_bar: bool | None = None,
        runtime: str = "eager",
        quantize: str | None = None,
        offload: str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: torch.device | str | None = None,
    ) -> Pipeline:
        """A pipeline from a model name (`nextscale models`), official files, a converted folder or the hub.

        Without arguments: the small clip-art model that comes with the package.

        `model` says which model the files are where their shapes leave a choice, `vae` where the tokenizer is if
        not beside them, `text_encoder` which T5 or Qwen2 to use. `dtype` is that of the matrix products (float32 unless
        told); `torch_dtype` and `device_map` are other spellings of `dtype` and `device`. `runtime` is "eager",
        "compiled" or "graphs" (CUDA graphs: the first calls of every size are slow, all others fast).
        `quantize="fp8"` rounds the weights of blocks, and what enters them, to 8 bits: half the memory. It needs a GPU
        like Ada, or like Hopper for the decoder's, too (docs/performance.md says what it costs).
        `offload="text"` keeps the text encoder in the host's memory, but for the moments in which it encodes.
        """
        check_runtime(runtime)
        check_offload(offload)
        source = read_path(source, "source")
        model = None if model is None else read_text(model, "model")
        vae = None if vae is None else read_path(vae, "vae")
        revision = None if revision is None else read_text(revision, "revision")
        if not (token is None or is_flag(token)):
            read_text(token, "token")
        read_flag(local_files_only, "local_files_only")
        if progress_bar is not None:
            read_flag(progress_bar, "progress_bar")
        if not isinstance(text_encoder, (str, Path)):
            check_encoder(text_encoder)
        hub = locate.Hub(revision, token, local_files_only)
        target = as_dtype(given(dtype, torch_dtype, torch.float32))
        where = as_device(given(device, device_map, "cpu"))
        check_quantize(quantize, where)
        plan = pretrained.read(locate.locate(source, model, vae, hub))
        if plan.spec.family not in ENCODERS and text_encoder is not None:
            raise NextscaleError(f"{plan.spec.name} reads class labels, not text: leave out text_encoder=")
        with bar(f"load {plan.spec.name}", plan.nbytes, progress_bar, data=True) as advance:
            backbone, tokenizer = plan.build(target, where if quantize is None else "cpu", advance)
        if quantize is not None:
            to_fp8(backbone, tokenizer, where)
        encoder = given(text_encoder, plan.build_text("cpu" if offload else where))
        if isinstance(encoder, (str, Path)) or (encoder is None and plan.spec.text_encoder):
            options: dict[str, Any] = {"token": token, "local_files_only": local_files_only}
            name = encoder or plan.spec.text_encoder
            encoder = ENCODERS[plan.spec.family](str(name), backbone.config.text_length, device=where, **options)
        return cls(backbone, tokenizer, plan.spec, encoder, progress_bar, plan.files, runtime, offload)

    def __repr__(self) -> str:
        return f"Pipeline({self.spec.name}, dtype={dtype_name(self.dtype)}, device={self.device})"

    @property
    def model(self) -> Model:
        return Model(self.backbone, self.tokenizer, self.spec)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def dtype(self) -> torch.dtype:
        return self.backbone.dtype

    def to(
        self, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | str | None = None
    ) -> Pipeline:
        """Move the model, in place; as in torch, a dtype may come first."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        where = self.device if device is None else as_device(device)
        if dtype is not None:
            check_change(self.backbone, as_dtype(dtype))
        self.executor = make_executor(self.executor.name, where)
        for module in (self.backbone, self.tokenizer):
            if dtype is not None:
                set_dtype(module, as_dtype(dtype))
            if device is not None:
                module.to(where)
        if device is not None and self.text_encoder is not None and self.offload is None:
            self.text_encoder.to(where)
        return self

    def encode_prompt(self, prompts: str | Sequence[str]) -> list[Tensor]:
        """Text features of every prompt, [length, dim]; they can be given back as `prompt_embeds`."""
        if self.text_encoder is None:
            raise NextscaleError(
                "this pipeline has no text encoder; pass prompt_embeds=, or text_encoder= when loading"
            )
        texts = read_strings(prompts, "prompts")
        if not texts:
            raise NextscaleError("no prompt was given")
        if self.offload is None:
            rows = self.text_encoder.encode(texts)
        else:
            with onload(self.text_encoder, self.device):
                rows = self.text_encoder.encode(texts)
        have, want = rows[0].shape[1], self.backbone.config.text_dim
        if not self.backbone.config.supports_text(*rows[0].shape):
            raise NextscaleError(f"the text encoder gives features of width {have}, but the model reads {want}")
        return rows

    def __call__(
        self,
        prompt: str | int | Sequence[str] | Sequence[int] | Tensor | None = None,
        *,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        seed: int | Sequence[int] | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        height: int | None = None,
        width: int | None = None,
        aspect_ratio: float | None = None,
        pixel_budget: str | None = None,
        guidance_scale: float | Sequence[float] | None = None,
        temperature: float | Sequence[float] | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        greedy: bool = False,
        smooth: bool | None = None,
        guidance_layers: int | Sequence[int] = (0,),
        method: Method | str | None = None,
        force_tokens: Sequence[Tensor] | None = None,
        callback_on_scale_end: Callback | None = None,
        output_type: str = "pil",
        prompt_embeds: Tensor | Sequence[Tensor] | None = None,
        negative_prompt_embeds: Tensor | Sequence[Tensor] | None = None,
    ) -> Output:
        """Make images of a prompt or class label, or of a list of them.

        Important:
            seed: the images of a call get seed, seed + 1, ...; a list names the seed of each. An image depends
                on its own seed only, not on the rest of the batch.
            generator: instead of a seed, the official code's use of one generator for the whole batch.
            guidance_scale: in the model's own convention (VAR: 0 = none, grows with the scale; Infinity: 1 = none).
                A list has one value per scale.
            height, width | aspect_ratio, pixel_budget: `aspect_ratio` is height / width.
            method: what is left out, as NOVA(t_est=8) or "nova:t_est=8"; None computes everything.
        To tinker with:
            greedy: the likeliest token everywhere. smooth: VAR's Gumbel-softmax option (HART's default).
            guidance_layers: 0 = guide the logits, -n = after the n-th block from the end.
            force_tokens: tokens of the first scales (a slice of `Output.tokens`), which are then not chosen.
            callback_on_scale_end: called with a `ScaleEnd`; returning False stops.
            output_type: "pil", "np", "pt", or "latent" for the feature map that the decoder reads.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        clock, self._clock = self._clock, None  # a callback may call again
        if clock is None or clock.device != self.device:
            clock = Clock(self.device)
        clock.mark("started")
        request = read_request(self.model, self._admit, **arguments)
        assert request.prompts is not None
        condition = request.prompts.condition(self.encode_prompt, self.device, self.executor.text_buckets)
        request = dataclasses.replace(request, condition=condition)
        clock.mark("encoded")
        # A second try must not call the user again, nor draw from the user's generator once more.
        again = request.callback is None and isinstance(request.noise, PerImageNoise)

        def run(executor: Executor) -> Output:
            return run_request(request, self.model, executor, clock, self.progress_bar)

        output = with_enough_memory(run, self.executor, again, request.images, request.schedule)
        self._clock = clock
        return output

    def check(self, prompt: Any = None, **arguments: Any) -> None:
        """Refuse what a call with these arguments would refuse, without encoding a prompt or making an image."""
        call = inspect.signature(self.__call__).bind(prompt, **arguments)
        call.apply_defaults()
        read_request(self.model, self._admit, **call.arguments)

    def _admit(self, prompts: Prompts, schedule: Schedule, guided: bool) -> None:
        """Warn of an untrained size, and refuse what the memory cannot hold."""
        self._warn_of_size(schedule)
        need = self._estimate(schedule, prompts.images, guided, prompts.text_length, prompts.encodes)
        need.require(self.device, prompts.images, schedule)

    def warm_up(
        self,
        sizes: Sequence[Any] = (None,),
        methods: Sequence[Method | str | None] = (None,),
        batches: Sequence[int] = (1,),
        *,
        text_tokens: int = 128,
        callbacks: bool = False,
        **options: Any,
    ) -> int:
        """Do now what the first calls of these shapes would have to wait for: compile kernels, capture CUDA graphs.
        Afterwards such calls capture nothing, whatever their prompts, seeds, and numbers are, and whatever a method
        decides; `captured` counts. Returns how many scales were captured.

        sizes: None for the model's own, (height, width), "0.25M", or a dict of arguments such as aspect_ratio.
        methods: None or as in a call. batches: numbers of images.
        text_tokens: of the longest prompt. callbacks: also for calls with a callback, as previews have.
        options: others of a call, such as guidance_scale (with guidance or without is what matters) or greedy.
        """
        return warm_up(self, sizes, methods, batches, text_tokens, read_flag(callbacks, "callbacks"), options)

    @property
    def captured(self) -> int:
        """Scales that were captured as CUDA graphs so far."""
        return self.executor.captured

    def encode(self, images: Image.Image | Sequence[Image.Image] | Tensor) -> list[Tensor]:
        """Images, or a tensor [B, 3, H, W] in [-1, 1] -> the tokens of every scale, as `force_tokens` takes them."""
        pixels = images if isinstance(images, Tensor) else from_pil(images)
        if pixels.ndim != 4 or pixels.shape[1] != 3 or not pixels.numel() or not pixels.is_floating_point():
            raise NextscaleError(f"images must be floats [B, 3, H, W] in [-1, 1], not {short_repr(pixels)}")
        if not torch.isfinite(pixels).all():
            raise NextscaleError("images hold NaN or infinite values; allowed: numbers in [-1, 1]")
        height, width = pixels.shape[2:]
        pixels = pixels.to(self.device, torch.float32)
        return self.tokenizer.encode(pixels, self.schedule(height, width)).tokens

    def decode(self, features: Tensor) -> Tensor:
        """Decode feature maps [B, d, H, W] to images [B, 3, H, W] in [-1, 1]."""
        return self.model.decode(features)

    def schedule(
        self,
        height: int | None = None,
        width: int | None = None,
        aspect_ratio: float | None = None,
        pixel_budget: str | None = None,
    ) -> Schedule:
        """The grids of an image of this size; by default the square that the model was made for."""
        return self.model.schedule(height, width, aspect_ratio, pixel_budget)

    def estimate(
        self,
        height: int | None = None,
        width: int | None = None,
        batch: int = 1,
        method: Method | str | None = None,
        text_length: int = 64,
    ) -> Estimate:
        """Memory that a guided call will need. A method only ever needs less KV cache than the plain run."""
        read_method(method)
        batch, text_length = read_count(batch, "batch", least=1), read_count(text_length, "text_length")
        return self._estimate(self.schedule(height, width), batch, True, text_length, encodes=True)

    def _estimate(self, schedule: Schedule, images: int, guided: bool, text_length: int, encodes: bool) -> Estimate:
        """`encodes`: whether the text encoder will be needed, which may not be loaded yet."""
        encoder, rests = 0, self.offload is not None
        if self.text_encoder is not None:
            encoder = (
                encoder_nbytes(self.text_encoder, self.device) if encodes else 0 if rests else self.text_encoder.nbytes
            )
        key = self.backbone.dtype, self.tokenizer.dtype, encoder, rests, schedule, images, guided, text_length
        if key not in self._estimates:  # counting takes as long as a small scale
            modules = (self.backbone, self.tokenizer)
            tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
            weights = sum(t.nbytes for t in tensors)
            made = estimate(self.backbone, self.tokenizer, schedule, images, guided, text_length, weights)
            found = dataclasses.replace(made, text_encoder=encoder, offload=rests)
            newest = list(self._estimates.items())[1 - MAX_ESTIMATES :]
            self._estimates = {**dict(newest), key: found}
            return found
        return self._estimates[key]

    def _warn_of_size(self, schedule: Schedule) -> None:
        """Once for every size."""
        height, width = (cells * self.tokenizer.stride for cells in schedule.last)
        if (height, width) in self._known_sizes:
            return
        self._known_sizes.add((height, width))
        if schedule.pixel_budget == EXTENDED:
            logger.warning("no model was trained for %dx%d: the last two scales extend its schedule", height, width)
            return
        if self.spec.sizes and (height, width) not in self.spec.sizes:
            trained = choices(f"{h}x{w}" for h, w in self.spec.sizes)
            logger.warning(
                "%s was trained for %s, so an image of %dx%d may look wrong", self.spec.name, trained, height, width
            )
        elif self.spec.weights and is_far(schedule, self.spec.pixel_budget):
            logger.warning(
                "%s was trained for images of about %s pixels, so one of %dx%d may look wrong",
                self.spec.name,
                self.spec.pixel_budget,
                height,
                width,
            )


def check_encoder(encoder: TextEncoder | None) -> None:
    if encoder is not None and not all(hasattr(encoder, name) for name in ("encode", "to", "nbytes")):
        raise NextscaleError(
            f"text_encoder must be a name, a path, or an object with encode, to and nbytes, not {short_repr(encoder)}"
        )


def check_offload(offload: str | None) -> None:
    if offload is not None:
        read_choice(offload, "offload", OFFLOADS)


def given(*values: Any) -> Any:
    """The first that is not None; the last if none is."""
    return next((v for v in values if v is not None), values[-1])
