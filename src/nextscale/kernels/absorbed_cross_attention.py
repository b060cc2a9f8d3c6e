"""Attention of many queries over a short text, with the linear layers around it multiplied into keys and values.

Of queries x W the scores are (x W) k = x (W k), and what is seen, p v, goes through another layer: (p v) U = p (v U).
For 64 keys in heads of 128 channels that is half of the arithmetic: W k and v U are made once for all queries. The same
numbers, up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

try:
    from nextscale.kernels.triton.absorbed_cross_attention import fused_fold, fused_softmax
except ImportError:  # a CPU build of torch comes without Triton
    fused_fold = fused_softmax = None  # type: ignore[assignment]

MANY = 768  # queries of a row that are worth it


def absorbs(x: Tensor, k: Tensor, q: nn.Module, proj: nn.Module) -> bool:
    """Whether queries made from x [R, K, C] by `q`, over keys k [R, H, T, D], are faster this way."""
    if fused_fold is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if not isinstance(q, nn.Linear) or not isinstance(proj, nn.Linear):
        return False
    slots, width = k.shape[2:]
    return x.shape[1] >= MANY and width == 128 and slots % 16 == 0 and 2 * slots <= width and q.in_features % 128 == 0


def attend_absorbed(
    x: Tensor, q: nn.Linear, proj: nn.Linear, k: Tensor, v: Tensor, scale: float, length: Tensor | None
) -> Tensor:
    """What x [R, K, C] sees of the first `length` [R] keys and values [R, H, T, D], through both layers."""
    on_gpu = fused_fold is not None and x.is_cuda
    keys, bias, values = (fused_fold if on_gpu else fold)(q, proj, k, v, scale / math.log(2), length)
    if on_gpu:  # sums stay in float32
        return torch.bmm(fused_softmax(torch.bmm(x, keys.mT, torch.float32), bias, k.shape[1], x.dtype), values)
    return torch.bmm(softmax(torch.bmm(x, keys.mT), bias, k.shape[1], x.dtype), values)


def fold(
    q: nn.Linear, proj: nn.Linear, k: Tensor, v: Tensor, factor: float, length: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [R, H T, C] that know the layers, and what to add to a score [R, H T]: -inf behind `length`."""
    heads, slots, width = k.shape[1:]
    into, out = (w.unflatten(n, (heads, width)) for w, n in ((q.weight, 0), (proj.weight, 1)))
    keys = torch.einsum("rhtd,hdc->rhtc", k, into) * factor
    bias = torch.einsum("rhtd,hd->rht", k, q.bias.view(heads, width)).float() * factor
    if length is not None:
        bias = bias.masked_fill(torch.arange(slots, device=k.device) >= length[:, None, None], -math.inf)
    # The weights of a head add up to 1: each of its values carries a head's share of the last bias.
    values = torch.einsum("rhtd,chd->rhtc", v, out) + proj.bias / heads
    return keys.flatten(1, 2), bias.flatten(1), values.flatten(1, 2)


def softmax(scores: Tensor, bias: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Weights [R, K, H T] of scores to the base 2."""
    scores = (scores + bias[:, None]).unflatten(-1, (heads, -1)) * math.log(2)
    return scores.softmax(-1).flatten(-2).to(dtype)
