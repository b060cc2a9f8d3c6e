"""Flash attention over rows of different lengths, which also returns the entropy of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.kernels import dispatch
from nextscale.kernels.fp8 import InputFormat
from nextscale.kernels.sdpa import attention_entropy, scaled_dot_product_attention, zero_masked
from nextscale.kernels.triton.flash_attention import fused_attention

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed

HEAD_DIMS = (32, 64, 128)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    length: Tensor | None = None,
    more: Tensor | None = None,
    return_entropy: bool = False,
    last_scale_kv: tuple[Tensor, Tensor] | None = None,
    input_format: InputFormat | None = None,
    chosen: Packed | None = None,
    grown: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from q [R, H, K, D] to the first `length` + `more` [R] of the keys and values [R, H, S, D] (all if None).
    With `last_scale_kv` [R, H, S', D], `more` counts keys and values there.

    Returns the output [R, H, K, D], perhaps in the `input_format` of the layer behind it, and with `return_entropy` the
    entropy of each query's weights, a mean over heads [R, K].

    The `chosen` queries may lie packed, [1, H, T, D]; results are then [1, H, T, D] and [1, T], undefined behind the
    last query. Instead of `more`, `grown` says whether the keys of a row have grown by as many as it has queries: in
    self-attention they have, over a text they have not.
    """
    assert chosen is None or more is None, "packed queries know how many they are"
    assert chosen is not None or not grown, "only packed queries know how many they are"
    assert last_scale_kv is None or grown or more is not None, "how many keys has the last scale?"
    assert length is not None or (more is None and not grown), "more than how many?"
    if supports(q):
        return fused_attention(q, k, v, scale, length, more, return_entropy, last_scale_kv, input_format, chosen, grown)
    if chosen is not None:
        more = chosen.count if grown else None
        q = chosen.padded(q.transpose(1, 2)).transpose(1, 2)
    total = length if more is None or last_scale_kv is not None or length is None else length + more
    mask = None if total is None else _visible(k, total)
    if last_scale_kv is not None:
        assert mask is not None
        assert more is not None
        mask = torch.cat((mask, _visible(last_scale_kv[0], more)), dim=-1)
        k, v = (torch.cat(both, dim=2) for both in zip((k, v), last_scale_kv, strict=True))
    if mask is not None:
        k, v = zero_masked(k, mask), zero_masked(v, mask)
    output = scaled_dot_product_attention(q, k, v, scale, mask)
    entropy = attention_entropy(q, k, scale, mask) if return_entropy else None
    if chosen is None:
        return output, entropy
    return chosen.packed(output.transpose(1, 2)).transpose(1, 2), None if entropy is None else chosen.packed(entropy)


def supports(q: Tensor) -> bool:
    """Whether the kernel takes these queries. Float32 would lose digits."""
    known = dispatch.enabled(q) and q.dtype in dispatch.HALF and q.shape[-1] in HEAD_DIMS
    return known and not torch.compiler.is_compiling()


def _visible(k: Tensor, length: Tensor) -> Tensor:
    """Which keys [R, H, S, D] are among the first `length` [R] of their row, [R, 1, 1, S]."""
    return (torch.arange(k.shape[2], device=k.device) < length[:, None])[:, None, None]
