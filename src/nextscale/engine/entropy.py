"""How uncertain a prediction is, in nats."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.kernels.bit_sampling import fused_entropy, takes


def token_entropy(logits: Tensor, unit: str = "token") -> Tensor:
    """Entropy of every token: [B, N, V] or, for bits, [B, N, d, 2] -> [B, N].

    A token of bits has the sum of its bits' entropies ("token") or their mean ("bit").
    """
    if takes(logits):
        return fused_entropy(logits, unit)
    if logits.ndim == 4 and logits.shape[-1] == 2:
        # Two outcomes need one number: H = softplus(z) - z sigmoid(z), z the difference of the logits.
        z = (logits[..., 1] - logits[..., 0]).float()
        entropy = F.softplus(z) - z * z.sigmoid()
        return entropy.mean(-1) if unit == "bit" else entropy.sum(-1)
    logp = logits.float().log_softmax(dim=-1)
    return -(logp.exp() * logp).sum(-1)


def attention_entropy(q: Tensor, k: Tensor, scale: float, mask: Tensor | None = None, chunk: int = 256) -> Tensor:
    """Entropy of every query's attention, averaged over heads: q [R, H, K, D], k [R, H, S, D] -> [R, K].

    H = logsumexp(s) - sum_j a_j s_j with the scores s and weights a: exact, a chunk of queries at a time, in float32
    because the scores of cosine attention reach 100. `mask` [R, 1, 1, S] is True where a key may be seen.
    """
    parts = []
    keys = k.float().transpose(-1, -2)
    for part in q.float().split(chunk, dim=2):
        scores = part @ keys * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        lse = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - lse).exp_()
        # sum_j a_j (s_j - lse) = -H; a hidden key has weight 0 and would give 0 * inf.
        parts.append(-(weights * (scores - lse).masked_fill(weights == 0, 0)).sum(-1).mean(1))
    return torch.cat(parts, dim=1)
