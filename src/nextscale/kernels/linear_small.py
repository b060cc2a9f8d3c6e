"""A linear layer of few rows whose result goes into a residual stream.

Reading the weights is then all the work, and cuBLAS has too few blocks to read them at full speed. Here several times
as many blocks split the input channels (split-K), and the sum with the stream adds up their partials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nextscale.kernels import dispatch, ragged_linear
from nextscale.kernels.fp8 import FP8_DTYPE, FP8Linear
from nextscale.kernels.split_k import SplitKPartials
from nextscale.kernels.triton.linear_small import fused_split_k

if TYPE_CHECKING:
    from nextscale.methods.selection import Packed

MAX_ROWS, SPLITS = 128, 4
BLOCK_OUT, BLOCK_IN = 64, 128  # channels of a block


def linear_split_k(x: Tensor, layer: nn.Linear | FP8Linear, packed: Packed | None = None) -> Tensor | SplitKPartials:
    """Apply the layer to x [R, K, C], or to packed tokens."""
    if packed is not None and ragged_linear.supports(x, layer):
        return ragged_linear.linear(x, layer, packed.start)
    x = layer.rounded(x) if isinstance(layer, FP8Linear) else x
    if supports(x, layer.weight):
        scale = layer.factor if isinstance(layer, FP8Linear) else 1.0
        return SplitKPartials(fused_split_k(x, layer.weight, scale, SPLITS, BLOCK_OUT, BLOCK_IN), layer.bias)
    return SplitKPartials(layer.product(x)[None], layer.bias) if isinstance(layer, FP8Linear) else layer(x)


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these, and is faster."""
    if not dispatch.enabled(x) or not dispatch.inference() or x.dtype not in (*dispatch.HALF, FP8_DTYPE):
        return False
    outputs, channels = weight.shape
    return x.shape[:-1].numel() <= MAX_ROWS and outputs % BLOCK_OUT == 0 and channels % (SPLITS * BLOCK_IN) == 0
