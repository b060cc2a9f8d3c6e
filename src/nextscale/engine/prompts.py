"""What the user asks for, as the condition of every image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nextscale.engine.trace import TracedImage
from nextscale.errors import NextscaleError
from nextscale.io.arguments import is_single, read_count, read_list, short_repr
from nextscale.models.base import Backbone
from nextscale.models.infinity import InfinityConfig
from nextscale.models.text_conditioning import TextCondition

Encode = Callable[[list[str]], list[Tensor]]  # texts -> features [length, dim]


class Prompts(ABC):
    images: int
    text_length: int = 0  # the longest, as far as it is known before encoding
    encodes: bool = False  # whether a text encoder is needed

    @abstractmethod
    def condition(self, encode: Encode, device: torch.device, text_buckets: tuple[int, ...]) -> Any:
        """Make what the backbone reads; texts are padded to one of `text_buckets` tokens."""

    @abstractmethod
    def traced(self, seeds: Sequence[int | None]) -> list[TracedImage]:
        """Who each image is."""


@dataclass
class Labels(Prompts):
    labels: list[int]
    repeat: int

    @property
    def images(self) -> int:  # type: ignore[override]
        return len(self.labels) * self.repeat

    def condition(self, encode: Encode, device: torch.device, text_buckets: tuple[int, ...]) -> Tensor:
        return torch.tensor(self.labels, device=device).repeat_interleave(self.repeat)

    def traced(self, seeds: Sequence[int | None]) -> list[TracedImage]:
        return [TracedImage(seed, label=self.labels[i // self.repeat]) for i, seed in enumerate(seeds)]


def read_prompts(
    backbone: Backbone, model: str, prompt: Any, negative: Any, embeds: Any, negative_embeds: Any, repeat: int
) -> Prompts:
    """Of whichever kind the model takes."""
    repeat = read_count(repeat, "num_images_per_prompt", least=1)
    if backbone.prompts != "label":
        return read_text(prompt, negative, embeds, negative_embeds, backbone.config, repeat)
    if any(x is not None for x in (negative, embeds, negative_embeds)):
        raise NextscaleError(f"{model} takes class labels, so it has no negative prompt and no embeddings")
    return read_labels(prompt, backbone.config.classes, repeat)


def read_labels(prompt: Any, classes: int, repeat: int) -> Labels:
    values = [prompt] if is_single(prompt) or isinstance(prompt, (str, bytes)) else list(prompt)
    if not values:
        raise NextscaleError("no class label was given")
    return Labels([read_count(value, "a class label", 0, classes - 1) for value in values], repeat)


@dataclass
class Texts(Prompts):
    """Every text is encoded once, however many images it has."""

    prompts: list[str] | None
    negatives: list[str] | None
    embeds: list[Tensor] | None
    negative_embeds: list[Tensor] | None
    repeat: int
    text_length: int = 0

    @property
    def images(self) -> int:  # type: ignore[override]
        return len(self.prompts or self.embeds or ()) * self.repeat

    @property
    def encodes(self) -> bool:  # type: ignore[override]
        return bool(self.prompts or any(self.negatives or ()))

    def condition(self, encode: Encode, device: torch.device, text_buckets: tuple[int, ...]) -> TextCondition:
        texts: list[Any] | None = self.embeds
        negatives: list[Any] | None = self.negative_embeds
        if texts is None or (negatives is None and self.negatives is not None):
            asked = [*(self.prompts or ()), *filter(None, self.negatives or ())]
            unique = list(dict.fromkeys(asked))
            features: dict[str, Tensor | None] = {"": None}  # no negative prompt, as in the official code
            if unique:
                features.update(zip(unique, encode(unique), strict=True))
            texts = texts or [features[p] for p in self.prompts or ()]
            negatives = negatives or ([features[p] for p in self.negatives] if self.negatives else None)
        unwanted = None if negatives is None else self._each(negatives)
        return TextCondition(self._each(texts), unwanted, text_buckets)

    def _each(self, values: list[Any]) -> list[Any]:
        return [v for v in values for _ in range(self.repeat)]

    def traced(self, seeds: Sequence[int | None]) -> list[TracedImage]:
        named: Sequence[str | None] = self.prompts or [None] * len(self.embeds or ())
        return [TracedImage(seed, prompt=named[i // self.repeat]) for i, seed in enumerate(seeds)]


def read_text(
    prompt: Any, negative: Any, embeds: Any, negative_embeds: Any, config: InfinityConfig, repeat: int
) -> Texts:
    if (prompt is None) == (embeds is None):
        raise NextscaleError("give either a prompt or prompt_embeds")
    if negative is not None and negative_embeds is not None:
        raise NextscaleError("give either a negative_prompt or negative_prompt_embeds, not both")
    prompts = None if prompt is None else read_strings(prompt, "prompt")
    if prompts is not None and any(not p.strip() for p in prompts):
        raise NextscaleError("the prompt is empty; say what the image should show")
    features = None if embeds is None else _features(embeds, "prompt_embeds", config)
    count = len(prompts or features or ())
    if not count:
        raise NextscaleError("no prompt was given")
    negatives = None if negative is None else read_strings(negative, "negative_prompt")
    negative_features = (
        None if negative_embeds is None else _features(negative_embeds, "negative_prompt_embeds", config)
    )
    for given, name in ((negatives, "negative prompts"), (negative_features, "negative embeddings")):
        if given is not None and len(given) not in (1, count):
            raise NextscaleError(f"{len(given)} {name} were given for {count} prompts; allowed: 1 or {count}")
    if negatives is not None and len(negatives) == 1:
        negatives *= count
    if negative_features is not None and len(negative_features) == 1:
        negative_features *= count
    length = max((len(f) for f in [*(features or ()), *(negative_features or ())]), default=64)
    return Texts(prompts, negatives, features, negative_features, repeat, length)


def read_strings(value: Any, name: str) -> list[str]:
    single = isinstance(value, (str, bytes)) or not isinstance(value, Sequence)
    values: list[Any] = [value] if single else list(value)
    for v in values:
        if not isinstance(v, str):
            raise NextscaleError(f"{name} must be text or a list of texts, not {short_repr(v)}")
        if any("\ud800" <= letter <= "\udfff" for letter in v):  # bytes of a command line that were no UTF-8
            raise NextscaleError(f"{name} holds broken characters: {short_repr(v)}")
    return values


def _features(value: Any, name: str, config: InfinityConfig) -> list[Tensor]:
    one = isinstance(value, Tensor) and value.ndim == 2
    rows = [value] if one else read_list(value, name, "a tensor or a list of tensors")
    for row in rows:
        if not isinstance(row, Tensor) or row.ndim != 2 or not config.supports_text(*row.shape):
            shape = list(row.shape) if isinstance(row, Tensor) else short_repr(row)
            raise NextscaleError(f"{name} must be [1..{config.text_length}, {config.text_dim}] per image, not {shape}")
        if not row.is_floating_point():
            raise NextscaleError(f"{name} must be floating-point numbers, not {short_repr(row)}")
    return rows
