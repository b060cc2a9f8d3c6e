"""NOVA's layer linkage, and the selection that follows from it: one pass over the entropies of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nextscale.kernels import topk
from nextscale.methods.selection import Packed, Selection, topk_select

MEAN, RATIO, DEVIATION, KEPT = range(4)  # rows of the statistics of a layer


class LayerLinkage(NamedTuple):
    """How the ratio of a scale becomes that of a layer, and a ratio a number of tokens."""

    linked: bool  # False: every layer has the scale's ratio
    first: int = 0  # layers before it are not counted
    lowest: float = 0.0  # of a ratio
    rounds: bool = True  # the nearest number of tokens, which may be 0; False: what is dropped is rounded down

    def ratios(self, ratio: float, means: Sequence[float]) -> list[float]:
        """Eq. 12 and 13 on the host, where the mean entropies of all layers are known: the ratio of every layer."""
        result = []
        for layer, mean in enumerate(means):
            deviation = 0.0
            if self.linked and layer > self.first and ratio > 0:
                usual = math.fsum(means[self.first : layer]) / (layer - self.first)
                deviation = (mean - usual) / usual if usual else 0.0
            linked = ratio * (1 - (deviation if math.isfinite(deviation) else 0.0))
            result.append(min(max(linked, self.lowest), 1.0) if ratio > 0 else ratio)
        return result

    def kept(self, ratio: float, tokens: int) -> int:
        """How many tokens a layer of this ratio keeps."""
        return math.floor(tokens * (1 - ratio) + 0.5) if self.rounds else max(tokens - math.floor(ratio * tokens), 1)

    def keep(
        self,
        entropy: Tensor,
        score: Tensor,
        ratio: Tensor,
        layer_stats: Tensor,
        layer: int,
        copies: int = 1,
        mean: Tensor | None = None,
    ) -> Selection:
        """Select the cells of highest score [B, N] for a layer of this entropy [B, N], `copies` times.

        `ratio` [B] is the scale's; `layer_stats` [layers, 4, B] are those of the layers before. `mean` [B] is the
        layer's entropy where it is not that of its tokens.
        """
        if topk.supports(score):
            return Packed(*topk.fused_link_and_select(entropy, score, ratio, layer_stats, layer, self, copies, mean))
        self.update(entropy.double().mean(1) if mean is None else mean, ratio, layer_stats, layer, entropy.shape[1])
        return topk_select(score, layer_stats[layer, KEPT].long(), copies)

    def update(self, mean: Tensor, ratio: Tensor, layer_stats: Tensor, layer: int, tokens: int) -> None:
        """Eq. 12 and 13: a layer that is less certain than those before it keeps more. All numbers are [B]."""
        deviation = torch.zeros_like(mean)
        if self.linked and layer > self.first:
            usual = layer_stats[self.first : layer, MEAN].mean(0)
            # What is not finite is complained about when the scale is over: until then, a number that counts as one.
            deviation = torch.where(usual == 0, 0, (mean - usual) / usual).nan_to_num(0, 0, 0)
        result = (ratio * (1 - deviation)).clamp_min(self.lowest).clamp_max(1.0)
        result = torch.where(ratio > 0, result, ratio)
        if self.rounds:
            kept = (tokens * (1 - result) + 0.5).floor()
        else:
            kept = (tokens - (result * tokens).floor()).clamp_min(1)
        layer_stats[layer] = torch.stack((mean, result, deviation, kept))
