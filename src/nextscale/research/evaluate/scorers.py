"""The scorers that come from packages of their own. Each function loads a network and gives back what it does.

Images are bytes [B, 3, H, W] here, as they are in the files; every network has its own idea of what to make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from nextscale.research.evaluate.features import features, network, perceptual
from nextscale.research.evaluate.psnr import psnr
from nextscale.research.evaluate.ssim import ssim

Pairs = Callable[[Tensor, Tensor], Tensor]  # two batches of images -> [B]
Prompted = Callable[[Tensor, Sequence[str]], Tensor]  # images and their prompts -> [B]
Described = Callable[[Tensor], Tensor]  # images -> features [B, D]

CLIP = ("ViT-L-14-quickgelu", "openai")
IMAGE_REWARD = "RE-N-Y/ImageReward"  # on the hub, in imscore's format
HPS = "RE-N-Y/hpsv21"


def unit(images: Tensor) -> Tensor:
    return images.float() / 255


def load_psnr(device: torch.device) -> Pairs:
    return lambda a, b: psnr(unit(a), unit(b), span=1)


def load_ssim(device: torch.device) -> Pairs:
    return lambda a, b: ssim(unit(a), unit(b), span=1)


def load_perceptual(device: torch.device) -> Pairs:
    network(device)  # complain about weights that are not there before any image is read
    return lambda a, b: perceptual(unit(a), unit(b))


def load_lite0(device: torch.device) -> Described:
    network(device)
    return lambda images: features(unit(images))


def load_lpips(device: torch.device) -> Pairs:
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    metric = LearnedPerceptualImagePatchSimilarity(net_type="alex", normalize=True).to(device)

    def score(a: Tensor, b: Tensor) -> Tensor:
        # It averages over a batch, and every image is wanted.
        each = [metric(x, y) for x, y in zip(unit(a).split(1), unit(b).split(1), strict=True)]
        metric.reset()
        return torch.stack(each)

    return score


def load_inception(device: torch.device) -> Described:
    """The network of FID, in the port whose numbers are those of the original TensorFlow code."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    net = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"]).to(device)
    return lambda images: net(images)[0]


def load_clip(device: torch.device) -> Prompted:
    import open_clip

    model, _, prepare = open_clip.create_model_and_transforms(*CLIP, device=device)
    tokenize = open_clip.get_tokenizer(CLIP[0])
    model.eval()

    def score(images: Tensor, prompts: Sequence[str]) -> Tensor:
        pil_images = [Image.fromarray(x.permute(1, 2, 0).cpu().numpy()) for x in images]
        seen = model.encode_image(torch.stack([prepare(p) for p in pil_images]).to(device), normalize=True)
        read = model.encode_text(tokenize(list(prompts)).to(device), normalize=True)
        return 100 * (seen * read).sum(-1).clamp_min(0)

    return score


def load_imagereward(device: torch.device) -> Prompted:
    from imscore.imreward import model as module
    from transformers import BertTokenizer

    class Tokenizer(BertTokenizer):
        """imscore 0.0.11 asks for an attribute that transformers 5 dropped, and never uses what it is told."""

        @property
        def additional_special_tokens_ids(self) -> Any:
            return self.convert_tokens_to_ids(["[ENC]"])

    theirs, module.BertTokenizer = module.BertTokenizer, Tokenizer
    try:
        return _imscore(module.ImageReward, IMAGE_REWARD, device)
    finally:
        module.BertTokenizer = theirs


def load_hpsv2(device: torch.device) -> Prompted:
    from imscore.hps.model import HPSv2

    return _imscore(HPSv2, HPS, device)


def _imscore(cls: Any, source: str, device: torch.device) -> Prompted:
    model = cls.from_pretrained(source).eval().to(device)
    return lambda images, prompts: model.score(unit(images), list(prompts)).flatten()
