"""Attention of many queries over a short text, with the linear layers around it multiplied into keys and values.

The scores of queries x W are (x W) k = x (W k), and the output p v goes through another layer: (p v) U = p (v U).
With 64 keys and heads of 128 channels that halves the arithmetic: W k and v U are made once for all queries. The
result is the same up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nextscale.kernels import dispatch
from nextscale.kernels.triton.absorbed_cross_attention import fused_fold, fused_softmax

MIN_QUERIES = 768  # of a row: fewer are not faster this way


def supports(x: Tensor, k: Tensor, q: nn.Module, proj: nn.Module) -> bool:
    """Whether queries made from x [R, K, C] by `q`, over keys k [R, H, T, D], are faster this way."""
    if not dispatch.enabled(x) or not x.is_cuda or not dispatch.inference() or x.dtype not in dispatch.HALF:
        return False
    if not isinstance(q, nn.Linear) or not isinstance(proj, nn.Linear):
        return False
    keys, head_dim = k.shape[2:]
    fits = head_dim == 128 and keys % 16 == 0 and 2 * keys <= head_dim and q.in_features % 128 == 0
    return fits and x.shape[1] >= MIN_QUERIES


def attend(
    x: Tensor, q: nn.Linear, proj: nn.Linear, k: Tensor, v: Tensor, scale: float, length: Tensor | None
) -> Tensor:
    """Attend from x [R, K, C] to the first `length` [R] keys and values [R, H, T, D], through both layers."""
    on_gpu = dispatch.enabled(x) and x.is_cuda
    keys, bias, values = (fused_fold if on_gpu else fold)(q, proj, k, v, scale / math.log(2), length)
    if on_gpu:  # sums stay in float32
        return torch.bmm(fused_softmax(torch.bmm(x, keys.mT, torch.float32), bias, k.shape[1], x.dtype), values)
    return torch.bmm(softmax(torch.bmm(x, keys.mT), bias, k.shape[1], x.dtype), values)


def fold(
    q: nn.Linear, proj: nn.Linear, k: Tensor, v: Tensor, scale: float, length: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply the layers into keys and values [R, H T, C], and make the bias of scores [R, H T]: -inf behind
    `length`."""
    heads, keys, head_dim = k.shape[1:]
    q_weight, proj_weight = (w.unflatten(n, (heads, head_dim)) for w, n in ((q.weight, 0), (proj.weight, 1)))
    folded_keys = torch.einsum("rhtd,hdc->rhtc", k, q_weight) * scale
    bias = torch.einsum("rhtd,hd->rht", k, q.bias.view(heads, head_dim)).float() * scale
    if length is not None:
        bias = bias.masked_fill(torch.arange(keys, device=k.device) >= length[:, None, None], -math.inf)
    # The weights of a head add up to 1: each of its values carries a head's share of the last bias.
    folded_values = torch.einsum("rhtd,chd->rhtc", v, proj_weight) + proj.bias / heads
    return folded_keys.flatten(1, 2), bias.flatten(1), folded_values.flatten(1, 2)


def softmax(scores: Tensor, bias: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Weights [R, K, H T] of scores to the base 2."""
    scores = (scores + bias[:, None]).unflatten(-1, (heads, -1)) * math.log(2)
    return scores.softmax(-1).flatten(-2).to(dtype)
