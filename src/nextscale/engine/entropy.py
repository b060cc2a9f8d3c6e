"""How uncertain a prediction is, in nats."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nextscale.kernels import bit_sampling


def token_entropy(logits: Tensor, unit: str = "token") -> Tensor:
    """Entropy of every token: [B, N, V] or, for bits, [B, N, d, 2] -> [B, N].

    A token of bits has the sum of its bits' entropies ("token") or their mean ("bit").
    """
    if bit_sampling.supports(logits):
        return bit_sampling.fused_entropy(logits, unit)
    if logits.ndim == 4 and logits.shape[-1] == 2:
        # Two outcomes need one number: H = softplus(z) - z sigmoid(z), z the difference of the logits.
        z = (logits[..., 1] - logits[..., 0]).float()
        entropy = F.softplus(z) - z * z.sigmoid()
        return entropy.mean(-1) if unit == "bit" else entropy.sum(-1)
    logp = logits.float().log_softmax(dim=-1)
    return -(logp.exp() * logp).sum(-1)
