"""Scaled dot-product attention, in one place so that a faster backend is a change of one line."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """q [R, H, K, D] over k, v [R, H, S, D]; `mask` is True where a key may be seen."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def blank(keys: Tensor, mask: Tensor) -> Tensor:
    """Keys or values [R, H, S, D] with zeros where nobody may see them; `mask` is [R, 1, 1, S]."""
    return keys.masked_fill(~mask.mT, 0)


def fresh_shapes(device: torch.device) -> AbstractContextManager[object]:
    """For calls whose number of tokens is hardly ever seen twice.

    cuDNN, torch's first choice on a new GPU, makes a plan for every shape that it meets, which takes a fifth of a
    second: in a batch whose layers each keep another number of tokens that was nearly all of the time.
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
