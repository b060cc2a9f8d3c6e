"""The decoder as CUDA graphs, for 1, 2, 4, ... images."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from nextscale.runtime.cudagraph.memory_arena import MemoryArena
from nextscale.runtime.cudagraph.segments import GraphSegments
from nextscale.runtime.decoder import FastDecode, max_decode_batch
from nextscale.tokenizers.base import ImageTokenizer


class DecoderGraphs:
    """Decodes with as many images at a time as there is a graph for, and without graphs where there is none."""

    def __init__(self) -> None:
        self.decode = FastDecode()
        self.graphs: dict[Hashable, tuple[GraphSegments, Tensor, Tensor]] = {}  # and its static input and output

    def clear(self) -> None:
        self.graphs.clear()

    def __call__(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        made = []
        while len(features):
            sizes = [n for n in powers_of_two(len(features)) if (tokenizer, (n, *features.shape[1:])) in self.graphs]
            if not sizes:
                made.append(self.decode(tokenizer, features))
                break
            graph, static_input, images = self.graphs[tokenizer, (sizes[-1], *features.shape[1:])]
            with torch.inference_mode():
                static_input.copy_(features[: sizes[-1]])
                graph.replay()
            made.append(images.clone())
            features = features[sizes[-1] :]
        return made[0] if len(made) == 1 else torch.cat(made)

    def without_graphs(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        """Decode while KV caches use the memory of the graphs; 1, 2, 4, ... maps at a time, for convolutions of every
        new shape are measured first."""
        parts = features.split([n for n in powers_of_two(len(features)) if n & len(features)])
        return torch.cat([self.decode(tokenizer, part) for part in parts])

    def capture_all(self, tokenizer: ImageTokenizer, features: Tensor, arena: MemoryArena) -> None:
        """Capture decoders of 1, 2, 4, ... features like these, which add up to any number of images."""
        for n in powers_of_two(min(len(features), max_decode_batch(tokenizer.decoder, features))):
            if (tokenizer, (n, *features.shape[1:])) not in self.graphs:
                self.capture(tokenizer, features[:n], arena)

    def capture(self, tokenizer: ImageTokenizer, features: Tensor, arena: MemoryArena) -> None:
        static_input = torch.zeros_like(features)
        images = self.decode(tokenizer, static_input)  # measures, loads
        torch.cuda.synchronize()
        with torch.cuda.stream(arena.stream):
            graph = GraphSegments(arena.chunk_pool.id)
            with graph.capture():
                images.copy_(self.decode(tokenizer, static_input))
        torch.cuda.synchronize()
        self.graphs[tokenizer, tuple(features.shape)] = graph, static_input, images


def powers_of_two(largest: int) -> list[int]:
    return [2**n for n in range(largest.bit_length())]
