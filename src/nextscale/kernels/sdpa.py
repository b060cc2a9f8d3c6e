"""torch's scaled dot-product attention, and the entropy of its weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """q [R, H, K, D] over k, v [R, H, S, D]; `mask` is True where a key is visible."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def zero_masked(keys: Tensor, mask: Tensor) -> Tensor:
    """Keys or values [R, H, S, D] with zeros where they are not visible; `mask` is [R, 1, 1, S]."""
    return keys.masked_fill(~mask.mT, 0)


def attention_entropy(q: Tensor, k: Tensor, scale: float, mask: Tensor | None = None, chunk: int = 256) -> Tensor:
    """Entropy of every query's attention, averaged over heads: q [R, H, K, D], k [R, H, S, D] -> [R, K].

    H = logsumexp(s) - sum_j a_j s_j with the scores s and weights a: exact, a chunk of queries at a time, in float32
    because the scores of cosine attention reach 100. `mask` [R, 1, 1, S] is True where a key is visible.
    """
    entropies = []
    keys = k.float().transpose(-1, -2)
    for queries in q.float().split(chunk, dim=2):
        scores = queries @ keys * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        lse = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - lse).exp_()
        # sum_j a_j (s_j - lse) = -H; a hidden key has weight 0 and would give 0 * inf.
        entropies.append(-(weights * (scores - lse).masked_fill(weights == 0, 0)).sum(-1).mean(1))
    return torch.cat(entropies, dim=1)


def without_cudnn(device: torch.device) -> AbstractContextManager[object]:
    """For calls whose number of tokens is hardly ever the same twice.

    cuDNN, torch's first choice on a new GPU, plans for every new shape, which takes a fifth of a second: in a batch
    whose layers each keep another number of tokens that was nearly all of the time.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def backends() -> dict[str, list[str]]:
    """The kernels that torch may choose from, per kind of device."""
    found = {"cpu": ["flash", "math"]}
    if torch.cuda.is_available():
        b = torch.backends.cuda
        enabled = {
            "flash": b.flash_sdp_enabled() and b.is_flash_attention_available(),
            "memory-efficient": b.mem_efficient_sdp_enabled(),
            "cudnn": b.cudnn_sdp_enabled(),
            "math": b.math_sdp_enabled(),
        }
        found["cuda"] = [name for name, on in enabled.items() if on]
    return found
