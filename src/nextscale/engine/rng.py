"""Where the random numbers of a run come from."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nextscale.errors import NextscaleError
from nextscale.io.arguments import is_single, read_count, read_list, short_repr

SEEDS = 2**128  # and as many below zero
Fill = Callable[..., Any]  # fills a tensor in place, with a generator


class NoiseSource(Protocol):
    """`images` names the images of the call whose rows are in the tensor, in order."""

    def categorical(self, probs: Tensor, scale: int, images: Sequence[int]) -> Tensor:
        """One index per distribution: [B, ..., V] -> [B, ...]."""
        ...

    def gumbel(self, like: Tensor, scale: int, images: Sequence[int]) -> Tensor:
        """Gumbel noise of the shape of `like`."""
        ...

    def normal(self, like: Tensor, scale: int, images: Sequence[int], name: str) -> Tensor:
        """Standard normal noise of the shape of `like`; a scale may need several, by name."""
        ...


class PerImageNoise:
    """Noise for (image, scale) comes from a generator seeded by (seed, scale).

    So neither the rest of the batch, nor skipped scales, nor a method that drops tokens changes the
    numbers of a cell, and an accelerated image can be compared with the plain one.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.seeds = list(seeds)
        self.generator = torch.Generator(device=device)

    def padded_to(self, images: int) -> PerImageNoise:
        """With numbers for so many, if they are more."""
        return PerImageNoise([*self.seeds, *[0] * (images - len(self.seeds))], self.generator.device)

    def noise(self, like: Tensor, scale: int, images: Sequence[int], stream: str, fill: Fill) -> Tensor:
        noise = torch.empty(like.shape, dtype=torch.float32, device=self.generator.device)
        self.write(noise, scale, images, stream, fill)
        return noise.to(like.device)

    def write(self, noise: Tensor, scale: int, images: Sequence[int], stream: str, fill: Fill) -> None:
        """Numbers into a place on the generator's device."""
        for row, image in enumerate(images):
            key = f"{self.seeds[image]}/{scale}/{stream}".encode()
            # CPU generators read 32 bits of a seed, so the three numbers are hashed, not added.
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
            fill(noise[row], generator=self.generator.manual_seed(seed))

    def race(self, like: Tensor, scale: int, images: Sequence[int]) -> Tensor:
        """E of the shape of `like`: the largest p / E is a draw from p."""
        return self._exponential(like, scale, images, "token")

    def _exponential(self, like: Tensor, scale: int, images: Sequence[int], stream: str) -> Tensor:
        return self.noise(like, scale, images, stream, Tensor.exponential_)

    def categorical(self, probs: Tensor, scale: int, images: Sequence[int]) -> Tensor:
        # An exponential race, in which every cell owns its numbers.
        return (probs / self.race(probs, scale, images)).argmax(dim=-1)

    def gumbel(self, like: Tensor, scale: int, images: Sequence[int]) -> Tensor:
        return -self._exponential(like, scale, images, "gumbel").log()

    def normal(self, like: Tensor, scale: int, images: Sequence[int], name: str) -> Tensor:
        return self.noise(like, scale, images, f"normal {name}", Tensor.normal_)


class StaticNoise(PerImageNoise):
    """Numbers that were drawn beforehand and lie at fixed places, where a captured scale reads them."""

    def __init__(self, source: PerImageNoise) -> None:
        self.source = source  # of the current call
        self.buffers: dict[int, dict[str, tuple[Tensor, Fill]]] = {}  # per scale, by their stream
        self.filled: set[int] = set()  # scales whose buffers hold the numbers of the current call

    def begin(self, source: PerImageNoise) -> None:
        """Begin another call."""
        self.source, self.filled = source, set()

    def noise(self, like: Tensor, scale: int, images: Sequence[int], stream: str, fill: Fill) -> Tensor:
        buffers = self.buffers.setdefault(scale, {})
        if stream not in buffers:
            buffers[stream] = self.source.noise(like, scale, images, stream, fill), fill
        return buffers[stream][0]

    def refill(self, scale: int, images: Sequence[int]) -> None:
        """Write what a scale will read, if that has not been done."""
        if scale not in self.filled:
            self.filled.add(scale)
            for stream, (buffer, fill) in self.buffers.get(scale, {}).items():
                if buffer.device == self.source.generator.device:
                    self.source.write(buffer, scale, images, stream, fill)
                else:
                    buffer.copy_(self.source.noise(buffer, scale, images, stream, fill))


class GeneratorNoise:
    """The call order and batch layout of the official code: one generator, one multinomial per scale."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def categorical(self, probs: Tensor, scale: int, images: Sequence[int]) -> Tensor:
        flat = probs.reshape(-1, probs.shape[-1])
        if self.generator is not None:
            flat = flat.to(self.generator.device)
        index = torch.multinomial(flat, 1, replacement=True, generator=self.generator)
        return index.view(probs.shape[:-1]).to(probs.device)

    def gumbel(self, like: Tensor, scale: int, images: Sequence[int]) -> Tensor:
        device = like.device if self.generator is None else self.generator.device
        noise = torch.empty_like(like, device=device).exponential_(generator=self.generator)
        return -noise.log().to(like.device)

    def normal(self, like: Tensor, scale: int, images: Sequence[int], name: str) -> Tensor:
        # The original draws these from torch's global generators; here they follow the one that is given.
        device = like.device if self.generator is None else self.generator.device
        return torch.empty_like(like, device=device).normal_(generator=self.generator).to(like.device)


def read_noise(
    seed: int | Sequence[int] | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    images: int,
    device: torch.device,
) -> tuple[NoiseSource, list[int | None]]:
    """The randomness that a call asks for, and the seed of every image (None where a generator was given)."""
    if seed is not None and generator is not None:
        raise NextscaleError("give seed or generator, not both")
    if isinstance(generator, torch.Generator):
        return GeneratorNoise(generator), [None] * images
    if generator is not None:
        generator = read_list(generator, "generator", "a torch.Generator or a list of them")
        for g in generator:
            if not isinstance(g, torch.Generator):
                raise NextscaleError(f"generator must be a torch.Generator or a list of them, not {short_repr(g)}")
        if len(generator) != images:
            raise NextscaleError(f"{len(generator)} generators were given for {images} images")
        seed = [int(torch.randint(2**62, (), generator=g, device=g.device)) for g in generator]
    seeds = _seeds(seed, images)
    return PerImageNoise(seeds, device), list(seeds)


def _seeds(seed: int | Sequence[int] | None, images: int) -> list[int]:
    """seed, seed + 1, ... of a number; random ones if none is given."""
    if seed is None:
        seed = secrets.randbelow(2**32)
    if is_single(seed):
        first = _seed(seed)
        return [first + i for i in range(images)]
    seeds = [_seed(s) for s in read_list(seed, "seed", "a whole number or a list of them")]
    if len(seeds) != images:
        raise NextscaleError(f"{len(seeds)} seeds were given for {images} images")
    return seeds


def _seed(value: object) -> int:
    return read_count(value, "seed", -SEEDS, SEEDS)
