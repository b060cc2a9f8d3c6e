"""The memory of a plain run after every scale (NOVA, Figure 2a)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from nextscale.engine.callback import ScaleEnd
from nextscale.engine.memory import GIB, estimate
from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.study import Study

MIB = 2**20


def measure(study: Study) -> Data:
    """Bytes of the KV cache after each scale and of what the scale computes with; on a GPU the real peak, too."""
    pipe = study.pipe
    schedule = pipe.schedule(**study.size)
    guided = pipe.model.sampling(len(schedule)).guided_until
    kv, activations = [], []
    for scale in schedule:
        is_guided = scale.index < guided
        so_far = dataclasses.replace(schedule, grids=schedule.grids[: scale.index + 1])
        alone = dataclasses.replace(schedule, grids=(scale.grid,))
        kv.append(estimate(pipe.backbone, pipe.tokenizer, so_far, 1, is_guided).kv_cache)
        activations.append(estimate(pipe.backbone, pipe.tokenizer, alone, 1, is_guided).blocks)
    return {
        "model": pipe.spec.name,
        "prompt": study.prompt,
        "seed": study.seed,
        "grids": [list(g) for g in schedule.grids],
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "unit": "bytes, one image, its guidance row included",
        "weights": pipe.estimate().weights,
        "kv_cache": kv,
        "activations": activations,
        "peak": peaks(study) if pipe.device.type == "cuda" else None,
    }


def peaks(study: Study) -> list[int]:
    """The most that was allocated within each scale, weights included."""
    device, found = study.pipe.device, list[int]()

    def after(end: ScaleEnd) -> None:
        found.append(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)

    ask = {"seed": study.seed, "output_type": "latent", **study.size}
    study.pipe(study.prompt, **ask)  # what is allocated once and for all
    torch.cuda.reset_peak_memory_stats(device)
    study.pipe(study.prompt, callback_on_scale_end=after, **ask)
    return found


def draw(data: Data, path: Path) -> None:
    figure = style.new_figure(4.2)
    axes = figure.subplots()
    scales = range(1, len(data["grids"]) + 1)
    measured = data["peak"] is not None
    all_of = [a + b for a, b in zip(data["kv_cache"], data["activations"], strict=True)]
    unit, name = (GIB, "GiB") if max(all_of) >= GIB else (MIB, "MiB")
    kv, activations = ([value / unit for value in data[key]] for key in ("kv_cache", "activations"))
    axes.bar(scales, kv, color=style.BLUE, label="KV cache after the scale")
    axes.bar(scales, activations, bottom=kv, color=style.ORANGE, label="what the scale computes with (estimate)")
    if measured:
        above = [(peak - data["weights"]) / unit for peak in data["peak"]]
        axes.plot(scales, above, "k^--", ms=6, lw=1, label="peak that was allocated, without the weights")
    axes.set_xticks(scales, [f"{t}\n{h}×{w}" for t, (h, w) in enumerate(data["grids"], start=1)])
    axes.tick_params(labelsize=9)
    axes.set(xlabel="scale", ylabel=f"memory, {name}")
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    style.plain_axes(axes)
    weights = f"weights: {data['weights'] / unit:.3g} {name}, {data['dtype']}"
    how = "measured" if measured else "by the package's estimate"
    figure.suptitle(f"Memory per scale of one guided image, {data['model']}, {how}; {weights}", fontsize=11)
    style.save(figure, path)
