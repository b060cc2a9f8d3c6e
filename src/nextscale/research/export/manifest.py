"""manifest.json: what made the images. `settings` must agree when an export goes on; `runs` says who did it where."""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import torch

from nextscale.engine.sampling import Sampling
from nextscale.errors import NextscaleError
from nextscale.io.devices import dtype_name
from nextscale.io.reading import read_json
from nextscale.methods import Method
from nextscale.pipeline import Pipeline
from nextscale.version import __version__, installed_version

FORMAT_VERSION = 1


def model_settings(
    pipe: Pipeline, sums: list[str], method: Method | None, sampling: Sampling, size: tuple[int, int]
) -> dict[str, Any]:
    """Collect what decides how the images look, as JSON gives it back."""
    values = dataclasses.asdict(sampling)
    del values["progress"]  # follows from the schedule
    encoder = pipe.text_encoder
    settings = {
        "model": pipe.spec.name,
        "dtype": dtype_name(pipe.dtype),
        "weights_sha256": sums,
        "text_encoder": None if encoder is None else getattr(encoder, "source", type(encoder).__name__),
        "method": {"name": "none", "fields": {}} if method is None else method.to_dict(),
        "sampling": values,
        "height": size[0],
        "width": size[1],
    }
    return json.loads(json.dumps(settings))


def run_facts(pipe: Pipeline, batch: int) -> dict[str, Any]:
    """Collect versions and hardware."""
    return {
        "nextscale": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: installed_version(name) for name in ("numpy", "pillow", "transformers")},
        "system": platform.platform(),
        "device": str(pipe.device),
        "hardware": _processor() if pipe.device.type != "cuda" else torch.cuda.get_device_name(pipe.device),
        "threads": torch.get_num_threads(),
        "batch": batch,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def read_manifest(path: Path) -> dict[str, Any]:
    content = read_json(path, "the manifest of an export")
    try:
        if content["nextscale_export"] != FORMAT_VERSION:
            raise NextscaleError(
                f"{path} has the format {content['nextscale_export']!r}; this nextscale writes {FORMAT_VERSION}"
            )
        if isinstance(content["settings"], dict) and isinstance(content["runs"], list):
            return content
    except (KeyError, TypeError):
        pass
    raise NextscaleError(f"{path} is not the manifest of an export")


def require_agreement(path: Path, settings: dict[str, Any]) -> None:
    """Refuse to mix images of two settings in one folder."""
    stored = read_manifest(path)["settings"]
    difference = first_difference({key: stored.get(key) for key in settings}, settings)
    if difference:
        raise NextscaleError(f"{path} is of an export with other settings: {difference}; choose another --out")


def first_difference(there: dict[str, Any], now: dict[str, Any], within: str = "") -> str | None:
    for key in dict.fromkeys((*now, *there)):
        a, b = there.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if inner := first_difference(a, b, f"{within}{key}."):
                return inner
        elif a != b:
            return f"{within}{key} is {_short(a)} there and {_short(b)} now"
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 70 else f"{text[:67]}..."
